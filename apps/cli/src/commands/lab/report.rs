//! `vdkit lab report`: writes a run as one HTML file.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use clap::{Args, ValueHint};
use vdkit_lab::{report, store::Store, verdict::verdict};

use crate::failure::{Exit, Failure, Outcome};
use crate::output::write_file;
use crate::session::Session;

#[derive(Args, Debug)]
pub struct ReportArgs {
    /// The run's file
    #[arg(value_name = "RUN", value_hint = ValueHint::FilePath)]
    run: PathBuf,
    /// The report's file, or `-` for standard output (default: RUN's name, ending in .html)
    #[arg(short = 'o', long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    output: Option<PathBuf>,
    /// Print the verdict as JSON and write no page
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

/// A report contains this text near its start. Only a file that contains it is overwritten.
const MARK: &str = "name=\"generator\" content=\"vdkit ";
/// The text is within this many bytes from the start.
const MARK_WITHIN: u64 = 4096;

impl ReportArgs {
    /// Writes the report.
    ///
    /// # Errors
    /// The run cannot be read; the file cannot be written, or exists and is not a report.
    pub fn run(self, session: &mut Session) -> Outcome {
        let run = Store::load(&self.run)?;
        if self.json {
            session.out.json(&verdict(&run));
            return Ok(Exit::Done);
        }
        let page = report::html(&run);
        let target = self.output.unwrap_or_else(|| self.run.with_extension("html"));
        if target.as_os_str() == "-" {
            session.out.bytes(page.as_bytes());
            return Ok(Exit::Done);
        }
        if !replaceable(&target) {
            return Err(Failure::failed(format!(
                "{}: exists and is not a report",
                target.display()
            ))
            .hint("name another file with --output"));
        }
        write_file(&target, page.as_bytes())?;
        session.out.line(target.display().to_string());
        Ok(Exit::Done)
    }
}

/// Whether the target does not exist, or is an older report.
fn replaceable(target: &Path) -> bool {
    let file = match File::open(target) {
        Ok(file) => file,
        Err(error) => return error.kind() == ErrorKind::NotFound,
    };
    let mut begin = Vec::new();
    let read = file.take(MARK_WITHIN).read_to_end(&mut begin);
    read.is_ok() && String::from_utf8_lossy(&begin).contains(MARK)
}
