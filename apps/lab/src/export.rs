//! Writes results for other programs, as CSV.

use std::io::{self, Write};

use crate::model::{Run, metric};

/// Writes one line for each value of each sample, and one for each cell without samples (RFC 4180,
/// but with line feeds alone). Columns: the axes, then outcome, reason, round, metric, unit, value.
pub fn csv(run: &Run, out: &mut impl Write) -> io::Result<()> {
    let mut heads: Vec<&str> = run.plan.axes.iter().map(String::as_str).collect();
    heads.extend(["outcome", "reason", "round", "metric", "unit", "value"]);
    line(out, heads)?;
    for cell in &run.cells {
        let (outcome, reason) = cell.outcome.state();
        let axes = run.plan.axes.iter().map(|axis| cell.axis(axis).unwrap_or_default());
        let start: Vec<&str> = axes.chain([outcome, reason.unwrap_or_default()]).collect();
        if cell.samples.is_empty() {
            line(out, start.iter().copied().chain(["", "", "", ""]))?;
        }
        for sample in &cell.samples {
            let round = sample.round.to_string();
            for (key, value) in &sample.values {
                let value = value.to_string();
                let unit = metric(key).map_or("", |metric| metric.unit);
                let end = [round.as_str(), key, unit, &value];
                line(out, start.iter().copied().chain(end))?;
            }
        }
    }
    Ok(())
}

fn line<'a>(out: &mut impl Write, fields: impl IntoIterator<Item = &'a str>) -> io::Result<()> {
    for (i, field) in fields.into_iter().enumerate() {
        if i > 0 {
            out.write_all(b",")?;
        }
        if field.contains(['"', ',', '\n', '\r']) {
            write!(out, "\"{}\"", field.replace('"', "\"\""))?;
        } else {
            out.write_all(field.as_bytes())?;
        }
    }
    out.write_all(b"\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tests::{measured, run_of};
    use crate::model::{Cell, Outcome};

    #[test]
    fn values_are_lines_of_a_table() {
        let outcome = Outcome::Skipped("no \"fio\", sorry".into());
        let skipped = Cell { outcome, ..measured(&[("layout", "qcow2")], "iops", &[]) };
        let cells = vec![measured(&[("layout", "raw")], "iops", &[1.5]), skipped];
        let run = run_of("iops", &["layout"], None, cells);
        let mut out = Vec::new();
        csv(&run, &mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "layout,outcome,reason,round,metric,unit,value\n\
             raw,measured,,0,iops,1/s,1.5\n\
             qcow2,skipped,\"no \"\"fio\"\", sorry\",,,,\n"
        );
    }
}
