//! `qemu-img check`: checks an image's metadata and repairs it.

use std::collections::BTreeSet;

use vdkit::jobs;
use vdkit::{CheckReport, Finding, Monitor, Repair, Severity};

use super::{
    Command, FORCE_SHARE, FORMAT, IMAGE_OPTS, OBJECT, OUTPUT, Output, QUIET, one_image, opening,
    wants_json,
};
use crate::failure::Failure;
use crate::getopt::{Parsed, valued};
use crate::json::{Dict, pretty};
use crate::open::{failed_open, open, open_options, registry};
use crate::output::{cancel_on_signal, say};

pub const COMMAND: Command = Command {
    name: "check",
    about: "Check and repair the metadata of an image",
    operands: "FILE",
    options: &[
        QUIET,
        FORMAT,
        IMAGE_OPTS,
        valued('T', "cache", "CACHE", "cache mode (writeback)"),
        FORCE_SHARE,
        OUTPUT,
        valued('r', "repair", "leaks|all", "repair leaks, or all that can be repaired"),
        OBJECT,
    ],
    run,
};

/// The format has no check.
const NOT_CHECKED: u8 = 63;

/// Formats whose metadata `qemu-img` checks, by QEMU's names.
const CHECKED: &[&str] = &["qcow2", "qed", "vdi", "vmdk", "vhdx", "parallels"];

fn run(parsed: &Parsed, out: &mut Output) -> Result<u8, Failure> {
    let json = wants_json(parsed)?;
    let repair = match parsed.last("repair") {
        None => Repair::Nothing,
        Some("leaks") => Repair::Leaks,
        Some("all") => Repair::All,
        Some(other) => {
            return Err(Failure::usage(format!(
                "--repair (-r) expects 'leaks' or 'all' not '{other}'"
            )));
        }
    };
    let file = one_image(parsed)?;
    let cache = opening::cache(parsed, "cache", "source cache")?.unwrap_or_default();
    let quiet = parsed.has("quiet");
    let (objects, image) = opening::image(parsed, file)?;
    let mut access = opening::access(parsed, file, repair != Repair::Nothing)?;
    access.cache = cache;
    let options = open_options(&image, access, &objects)?;
    // The whole chain is opened, as QEMU does: a missing backing image is a failure.
    let (name, file_bytes) = {
        let share = access.share || access.writable;
        let reading = crate::open::Access { writable: false, share, ..access };
        let disk = open(&image, reading, &objects)?;
        (disk.top().name(), disk.top().storage().len()?)
    };
    if !CHECKED.contains(&name) {
        return Err(Failure::new("This image format does not support checks").code(NOT_CHECKED));
    }
    if repair != Repair::Nothing && matches!(name, "vdi" | "vmdk") {
        let why =
            format!("vdkit repairs {name} images as 'vdkit check --repair', not by this name");
        return Err(Failure::new(why).code(NOT_CHECKED));
    }
    let path = &image.opened(options.lock);
    let monitor = Monitor::default().cancelled_by(cancel_on_signal()?);
    let checked = jobs::check(&registry(), path, &options, repair, &monitor)
        .map_err(|error| failed_open(&image, options.format.as_deref(), &error))?;
    let report = shown(name, checked.report, file_bytes);
    print_findings(&report, quiet);
    if json {
        out.said(pretty(&value(file, name, &report).into()));
    } else if !quiet {
        out.text(text(&report));
    }
    Ok(match (report.corruptions_left(), report.leaks_left()) {
        (0, 0) => 0,
        (0, _) => 3,
        _ => 2,
    })
}

/// What QEMU counts for the format.
fn shown(format: &str, mut report: CheckReport, file_bytes: u64) -> CheckReport {
    if report.image_end_offset == 0 {
        report.image_end_offset = file_bytes;
    }
    if !matches!(format, "qcow2" | "parallels") {
        report.image_end_offset = 0;
    }
    if format == "qcow2" {
        // QEMU does not count the corrupt bit; `info` reports it.
        let is_bit = |finding: &mut Finding| finding.structure == "corrupt bit";
        for _bit in report.findings.extract_if(.., is_bit) {
            report.corruptions -= 1;
            report.corruptions_fixed = report.corruptions_fixed.min(report.corruptions);
        }
        let follow = flags_that_followed(&report.findings);
        report.corruptions -= follow;
        report.corruptions_fixed -= follow;
    }
    // QEMU does not search a VHDX for leaks.
    if format == "vhdx" {
        (report.leaks, report.leaks_fixed) = (0, 0);
        report.findings.retain(|finding| finding.severity != Severity::Leak);
    }
    if !matches!(format, "qcow2" | "parallels" | "qed") {
        report.total_clusters = 0;
        report.allocated_clusters = 0;
        report.fragmented_clusters = 0;
        report.compressed_clusters = 0;
    }
    if report.compressed_clusters > 0 {
        // QEMU counts each compressed cluster as fragmented.
        report.fragmented_clusters = report.fragmented_clusters.max(report.compressed_clusters);
    }
    report
}

/// Number of COPIED flags that became right when the refcounts of their clusters were repaired: QEMU
/// checks the flags after that repair, and does not count these.
fn flags_that_followed(findings: &[Finding]) -> u64 {
    /// The host offset in an entry of a qcow2 table.
    const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
    let refcounts: BTreeSet<u64> = findings
        .iter()
        .filter(|finding| finding.structure == "refcount" && finding.repaired)
        .map(|finding| finding.offset)
        .collect();
    let follows = |finding: &&Finding| {
        let entry = finding.message.split_once("found 0x").map_or("", |(_, rest)| rest);
        let digits = entry.split(' ').next().unwrap_or_default();
        finding.repaired
            && entry.contains("with COPIED flag")
            && u64::from_str_radix(digits, 16)
                .is_ok_and(|entry| refcounts.contains(&(entry & OFFSET)))
    };
    findings.iter().filter(follows).count() as u64
}

/// Prints findings on stderr.
fn print_findings(report: &CheckReport, quiet: bool) {
    if quiet {
        return;
    }
    for finding in &report.findings {
        let kind = match finding.severity {
            Severity::Leak => "Leaked",
            Severity::Corruption => "ERROR",
            Severity::Warning => "Warning",
        };
        let repaired = if finding.repaired { " (repaired)" } else { "" };
        say(format_args!(
            "{kind}: {} at offset {:#x}: {}{repaired}",
            finding.structure, finding.offset, finding.message
        ));
    }
}

fn value(file: &str, format: &str, report: &CheckReport) -> Dict {
    let mut dict =
        Dict::default().with("filename", file).with("format", format).with("check-errors", 0_u64);
    for (key, count) in [
        ("image-end-offset", report.image_end_offset),
        ("corruptions", report.corruptions_left()),
        ("leaks", report.leaks_left()),
        ("corruptions-fixed", report.corruptions_fixed),
        ("leaks-fixed", report.leaks_fixed),
        ("total-clusters", report.total_clusters),
        ("allocated-clusters", report.allocated_clusters),
        ("fragmented-clusters", report.fragmented_clusters),
        ("compressed-clusters", report.compressed_clusters),
    ] {
        if count != 0 {
            dict.put(key, count);
        }
    }
    dict
}

fn text(report: &CheckReport) -> String {
    let mut text = String::new();
    if report.corruptions_fixed + report.leaks_fixed > 0 {
        text += &format!(
            "The following inconsistencies were found and repaired:\n\n    {} leaked clusters\n    {} \
             corruptions\n\nDouble checking the fixed image now...\n",
            report.leaks_fixed, report.corruptions_fixed
        );
    }
    let (leaks, corruptions) = (report.leaks_left(), report.corruptions_left());
    if leaks + corruptions == 0 {
        text += "No errors were found on the image.\n";
    }
    if corruptions > 0 {
        text += &format!(
            "\n{corruptions} errors were found on the image.\nData may be corrupted, or further writes to \
             the image may corrupt it.\n"
        );
    }
    if leaks > 0 {
        text += &format!(
            "\n{leaks} leaked clusters were found on the image.\nThis means waste of disk space, but no \
             harm to data.\n"
        );
    }
    if report.total_clusters > 0 && report.allocated_clusters > 0 {
        let share = |part: u64, of: u64| part as f64 * 100.0 / of as f64;
        text += &format!(
            "{}/{} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters\n",
            report.allocated_clusters,
            report.total_clusters,
            share(report.allocated_clusters, report.total_clusters),
            share(report.fragmented_clusters, report.allocated_clusters),
            share(report.compressed_clusters, report.allocated_clusters),
        );
    }
    if report.image_end_offset > 0 {
        text += &format!("Image end offset: {}\n", report.image_end_offset);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_has_qemus_words() {
        let report = CheckReport {
            leaks: 3,
            total_clusters: 160,
            allocated_clusters: 13,
            image_end_offset: 1_376_256,
            ..CheckReport::default()
        };
        assert_eq!(
            text(&report),
            "\n3 leaked clusters were found on the image.\nThis means waste of disk space, but no harm to \
             data.\n13/160 = 8.12% allocated, 0.00% fragmented, 0.00% compressed clusters\nImage end \
             offset: 1376256\n"
        );
        let repaired = CheckReport { leaks_fixed: 3, ..report };
        let said = text(&repaired);
        assert!(said.contains("    3 leaked clusters\n    0 corruptions\n\nDouble"), "{said}");
        assert!(said.contains("No errors were found on the image.\n13/160"), "{said}");
    }
}
