//! Times the command `vdkit` beside `qemu-img` and `cp`: whole programs, one run of each in turn.
//!
//! A *cell* is one job on one image on one file system; its *candidates* are the programs (or the
//! flags of one program) that do the job. For each cell the harness runs every candidate once to
//! warm up and to check its result, then all of them in turn, round by round, so that whatever
//! else the machine does meets all of them alike. Between runs the target is removed and the file
//! system synced. Raw samples go to a JSON file, medians and paired ratios to a Markdown table.
//!
//! ```text
//! scratch   mounts tmpfs, xfs, ext4, btrfs    images    makes the images of the cells
//!      \                                       /
//!       groups  (null, file, check, compress, encryption, serve, durable: which cells there are)
//!          |
//!        pair   runs the candidates in turn ── process  one program: time, CPU, memory
//!          |                              └─── memory   what a program finds at hand
//!          |
//!       report  samples → medians, ratios → JSON, Markdown     machine  where it was run
//! ```

mod groups;
mod images;
mod machine;
mod memory;
mod options;
mod pair;
mod process;
mod report;
mod scratch;

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use options::{Arguments, Group, Options};
use report::Report;

fn main() -> ExitCode {
    let options = match Options::new(Arguments::parse()) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("vdkit-bench: {error:#}");
            return ExitCode::from(2);
        }
    };
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("vdkit-bench: {error:#}");
            ExitCode::from(1)
        }
    }
}

/// Measures (or only renders); whether every result was right.
fn run(options: &Options) -> Result<bool> {
    let mut report = if options.render.is_empty() {
        process::stop_on_signals()?;
        let report = measure(options)?;
        report.write_json(&options.json)?;
        eprintln!("samples: {}", options.json.display());
        report
    } else {
        Report::read_all(&options.render)?
    };
    report.sort();
    println!("{}", report.markdown());
    if let Some(document) = &options.update {
        report
            .update_document(document)
            .with_context(|| format!("cannot update {}", document.display()))?;
        eprintln!("updated: {}", document.display());
    }
    let wrong = report.faults();
    for fault in &wrong {
        eprintln!("vdkit-bench: WRONG: {fault}");
    }
    Ok(wrong.is_empty())
}

/// Runs the chosen groups. Samples are saved after each cell, so that an interrupt loses one.
fn measure(options: &Options) -> Result<Report> {
    let mut report = Report::new(machine::describe(options)?);
    for &file_system in &options.file_systems {
        let groups = options.groups_on(file_system);
        if groups.is_empty() {
            continue;
        }
        let scratch = scratch::Scratch::mount(file_system, &options.work, options.scratch_bytes())?;
        for group in groups {
            let mut save = |cell| {
                report.add(cell);
                report.write_json(&options.json)
            };
            match group {
                Group::Null => groups::null::measure(options, &scratch, &mut save)?,
                Group::File => groups::file::measure(options, &scratch, &mut save)?,
                Group::Check => groups::check::measure(options, &scratch, &mut save)?,
                Group::Compress => groups::compress::measure(options, &scratch, &mut save)?,
                Group::Encryption => groups::encryption::measure(options, &scratch, &mut save)?,
                Group::Serve => groups::serve::measure(options, &scratch, &mut save)?,
                Group::Durable => groups::durable::measure(options, &scratch, &mut save)?,
            }
        }
        scratch.unmount()?;
    }
    Ok(report)
}
