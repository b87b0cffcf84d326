//! The table of each group: its columns, and what a cell has in them.

use super::{Cell, Series, durable, processor, ratio, ratio_of};
use crate::options::Group;

/// A column of a table; cells have at least two candidates.
pub struct Column {
    title: &'static str,
    right: bool,
    value: fn(&Cell) -> String,
}

/// A column of words.
pub const fn words(title: &'static str, value: fn(&Cell) -> String) -> Column {
    Column { title, right: false, value }
}

/// A column of numbers.
pub const fn number(title: &'static str, value: fn(&Cell) -> String) -> Column {
    Column { title, right: true, value }
}

/// These cells, one a line.
pub fn of(cells: &[&Cell], columns: &[Column]) -> String {
    let line = |value: &dyn Fn(&Column) -> String| {
        format!("| {} |\n", columns.iter().map(value).collect::<Vec<_>>().join(" | "))
    };
    let mut text = line(&|column| column.title.to_owned());
    let ruler = columns.iter().map(|column| if column.right { "---:" } else { "---" });
    text += &format!("|{}|\n", ruler.collect::<Vec<_>>().join("|"));
    for cell in cells.iter().filter(|cell| cell.series.len() > 1) {
        text += &line(&|column| (column.value)(cell));
    }
    text
}

/// The columns of a group's table.
pub fn columns(group: Group) -> &'static [Column] {
    match group {
        Group::Null => NULL,
        Group::File => FILE,
        Group::Check => CHECK,
        Group::Compress => COMPRESS,
        Group::Encryption => ENCRYPTION,
        Group::Serve => SERVE,
        Group::Durable => durable::COLUMNS,
    }
}

pub const FILE_SYSTEM: Column =
    words("file system", |cell| cell.name.file_system.name().to_owned());
pub const JOB: Column = words("job", |cell| cell.name.job.clone());
pub const MEMORY: Column = number("peak memory", |cell| cell.vdkit().memory());
pub const RUNS: Column = number("runs", |cell| cell.vdkit().runs.len().to_string());
const VDKIT: Column = number("vdkit", |cell| cell.vdkit().time());
const QEMU: Column = number("qemu-img", |cell| cell.peer().time());
const RATIO: Column = number("qemu-img ÷ vdkit", |cell| ratio(cell.peer(), cell.vdkit()));
const CPU: Column = number("CPU", |cell| processor(cell.vdkit(), Some(cell.peer())));
const BEST: Column = number("best qemu-img", |cell| shown(cell.best_peer(), Series::time));
const BEST_WITH: Column = words("with", |cell| shown(cell.best_peer(), |s| s.flags().to_owned()));
const BEST_RATIO: Column =
    number("qemu-img ÷ vdkit", |cell| shown(cell.best_peer(), |best| ratio(best, cell.vdkit())));
const BEST_CPU: Column = number("CPU", |cell| processor(cell.vdkit(), cell.best_peer()));

/// A figure of a series, if there is one.
fn shown(series: Option<&Series>, figure: impl Fn(&Series) -> String) -> String {
    series.map_or_else(|| "–".to_owned(), figure)
}

const NULL: &[Column] = &[
    FILE_SYSTEM,
    words("image", |cell| {
        let format = cell.name.job.split('→').next().unwrap_or_default();
        format!("{} {format}", cell.name.content)
    }),
    VDKIT,
    QEMU,
    RATIO,
    CPU,
    MEMORY,
    RUNS,
];

/// The copy of the file as it is.
fn copy(cell: &Cell) -> Option<&Series> {
    cell.series.iter().find(|series| series.name.starts_with("cp"))
}

const FILE: &[Column] = &[
    FILE_SYSTEM,
    JOB,
    words("image", |cell| cell.name.content.clone()),
    VDKIT,
    BEST,
    BEST_WITH,
    BEST_RATIO,
    BEST_CPU,
    number("cp", |cell| shown(copy(cell), |copy| format!("{} ({})", copy.time(), copy.name))),
    number("vdkit ÷ cp", |cell| shown(copy(cell), |copy| ratio(cell.vdkit(), copy))),
    number("vdkit + sync", |cell| cell.vdkit().synced_time()),
    number("best qemu-img + sync", |cell| shown(cell.best_peer(), Series::synced_time)),
    MEMORY,
    RUNS,
];

const CHECK: &[Column] = &[
    FILE_SYSTEM,
    words("clusters", |cell| cell.name.content.clone()),
    words("page cache", |cell| cell.name.job.clone()),
    VDKIT,
    QEMU,
    RATIO,
    CPU,
    MEMORY,
    number("qemu-img's", |cell| cell.peer().memory()),
    RUNS,
];

fn target_size(series: &Series) -> String {
    series.target_bytes.map_or("–".to_owned(), |bytes| format!("{:.1} MB", bytes as f64 / 1e6))
}

const COMPRESS: &[Column] = &[
    FILE_SYSTEM,
    JOB,
    VDKIT,
    BEST,
    BEST_WITH,
    BEST_RATIO,
    BEST_CPU,
    number("vdkit's file", |cell| target_size(cell.vdkit())),
    number("qemu-img's", |cell| shown(cell.best_peer(), target_size)),
    MEMORY,
    RUNS,
];

const ENCRYPTION: &[Column] = &[
    FILE_SYSTEM,
    JOB,
    VDKIT,
    BEST,
    BEST_WITH,
    BEST_RATIO,
    BEST_CPU,
    MEMORY,
    number("qemu-img's", |cell| shown(cell.best_peer(), Series::memory)),
    RUNS,
];

fn nbdkit(cell: &Cell) -> Option<&Series> {
    cell.series.get(2)
}

const SERVE: &[Column] = &[
    FILE_SYSTEM,
    JOB,
    number("vdkit", |cell| cell.vdkit().rate()),
    number("qemu-nbd", |cell| cell.peer().rate()),
    number("vdkit ÷ qemu-nbd", |cell| ratio(cell.peer(), cell.vdkit())),
    number("nbdkit raw", |cell| shown(nbdkit(cell), Series::rate)),
    number("vdkit ÷ nbdkit", |cell| shown(nbdkit(cell), |other| ratio(other, cell.vdkit()))),
    number("requests per CPU second", |cell| {
        let (vdkit, qemu) = (cell.vdkit().processor_rate(), cell.peer().processor_rate());
        format!("{vdkit} : {qemu} : {}", shown(nbdkit(cell), Series::processor_rate))
    }),
    number("÷ qemu-nbd", |cell| processor_ratio(cell.peer(), cell)),
    number("÷ nbdkit", |cell| shown(nbdkit(cell), |other| processor_ratio(other, cell))),
    MEMORY,
    RUNS,
];

/// How much more of the processor's time a peer takes.
pub fn processor_ratio(peer: &Series, cell: &Cell) -> String {
    ratio_of(peer, cell.vdkit(), Series::processors)
}
