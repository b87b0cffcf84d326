//! Checks an image's metadata, and repairs leaks if told to: `check FILE [--repair]`.

use vdkit::jobs::check;
use vdkit::{Monitor, OpenOptions, Repair};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some(file) = args.first() else { return Err("usage: check FILE [--repair]".into()) };
    let repair = if args.len() > 1 { Repair::Leaks } else { Repair::Nothing };
    let options = OpenOptions::read_only();
    let checked = check(&vdkit::registry(), file, &options, repair, &Monitor::default())?;
    for finding in &checked.report.findings {
        println!("{}", finding.message);
    }
    println!("{} errors, {} leaks", checked.report.corruptions, checked.report.leaks);
    Ok(())
}
