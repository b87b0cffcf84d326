//! `vdkit doctor`: reports faults and slow settings, each with the command that repairs it.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use vdkit::jobs::{
    self, Allocation, DoctorEvidence, DoctorFinding, DoctorImage, DoctorOptions, DoctorReport,
    DoctorSeverity,
};

use super::{Run, Subcommand, runs};
use crate::arguments::{Json, ProgressOption, References};
use crate::failure::{Exit, Failure, Outcome, quoted_word};
use crate::output::{Output, bytes_short, counted};
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "doctor",
    about: "Find faults and slow settings of images, with the commands that repair them",
    details: "\
Reads only metadata and changes nothing. Also works on an image that a running guest uses. For a \
folder it examines every image in it. Exit codes: 0 nothing but advice, 3 warnings, 4 errors: an \
image is damaged, or cannot be read as it is. In the printed commands, replace the words in \
capitals.",
    examples: "
vdkit doctor disk.qcow2
vdkit doctor /var/lib/libvirt/images          every image in the folder, and images whose backing image is missing
vdkit doctor --libvirt disk.qcow2             also prints the <disk> element for libvirt
vdkit doctor --json disk.qcow2 | jq '.images[].findings[].code'
",
    ..runs::<DoctorArgs>()
};

#[derive(Args, Debug)]
pub struct DoctorArgs {
    /// An image or a folder
    #[arg(value_name = "IMAGE|DIR", value_hint = ValueHint::AnyPath)]
    path: PathBuf,
    /// Format of the image (default: probed from its header)
    #[arg(short = 'f', long, value_name = "FORMAT")]
    format: Option<String>,
    /// Search subfolders too
    #[arg(short = 'r', long)]
    recursive: bool,
    /// Print libvirt's `<disk>` element for the image
    ///
    /// The element has the cache mode that suits the file system, the image's backing chain, and a
    /// larger metadata cache if the image needs one.
    #[arg(long)]
    libvirt: bool,
    #[command(flatten)]
    references: References,
    #[command(flatten)]
    progress: ProgressOption,
    #[command(flatten)]
    json: Json,
}

impl Run for DoctorArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let folder = self.path.is_dir();
        if folder && self.format.is_some() {
            return Err(Failure::usage("--format is for one image; a folder's images are probed"));
        }
        let mut options = DoctorOptions::default();
        options.format = self.format;
        options.refs = self.references.policy();
        options.recursive = self.recursive;
        options.libvirt = self.libvirt;
        let report = self.progress.run("doctor", session, |monitor| {
            jobs::doctor(&vdkit::registry(), &self.path, &options, monitor)
        })??;
        self.json.print(&report, &mut session.out, |report, out| {
            report.images.iter().for_each(|image| print(image, out));
            if folder { sum_up(report, out) } else { print_findings(&report.findings, out) }
        });
        Ok(match &report {
            report if report.errors > 0 => Exit::Corrupt,
            report if report.warnings > 0 => Exit::Differs,
            _ => Exit::Done,
        })
    }
}

fn print(image: &DoctorImage, out: &mut Output) {
    let mut line = image.path.display().to_string();
    if let (Some(format), Some(size)) = (image.format, image.virtual_size) {
        line.push_str(&format!("  {format} {}", bytes_short(size)));
    }
    if image.findings.is_empty() {
        line.push_str(if image.checked {
            "  nothing found"
        } else {
            "  nothing found in its header"
        });
    }
    out.line(line);
    if let Some(evidence) = &image.evidence {
        out.line(format!("  {}", figures(evidence)));
        out.line(format!("  cache={} for guests: {}", evidence.cache, evidence.cache_reason));
    }
    print_findings(&image.findings, out);
    if let Some(xml) = &image.libvirt {
        xml.lines().for_each(|line| out.line(format!("    {line}")));
    }
}

/// The measured values in one line.
fn figures(evidence: &DoctorEvidence) -> String {
    let mut said = Vec::new();
    let kind = evidence.file_system.as_deref().unwrap_or("device");
    match (evidence.cluster_bytes, evidence.block_bytes) {
        (Some(cluster), Some(block)) => {
            said.push(format!(
                "clusters of {} on {kind} blocks of {}",
                bytes_short(cluster),
                bytes_short(block)
            ));
        }
        (None, Some(block)) => said.push(format!("on {kind} blocks of {}", bytes_short(block))),
        _ => said.push(format!("on {kind}")),
    }
    if evidence.file_system.is_some() {
        let allocation = match evidence.allocation {
            Allocation::Sparse => "sparse",
            Allocation::Metadata => "its map preallocated",
            Allocation::Full => "fully allocated",
        };
        let allocated = bytes_short(evidence.allocated_bytes);
        said.push(format!("{allocation}, takes {allocated}"));
    }
    if let Some(free) = evidence.free_bytes {
        let growth = bytes_short(evidence.growth_bytes);
        said.push(format!("may grow by {growth} ({} free)", bytes_short(free)));
    }
    if let Some(map) = evidence.map_bytes {
        said.push(format!("map of {}", bytes_short(map)));
    }
    if let (Some(extents), Some(jumps)) = (evidence.extents, evidence.jumps) {
        said.push(format!("extents {extents}, jumps {jumps}"));
    }
    if let (Some(out_of_order), Some(all)) =
        (evidence.fragmented_clusters, evidence.allocated_clusters)
    {
        said.push(format!("clusters out of order {out_of_order} of {all}"));
    }
    said.push(format!("snapshots {}, chain of {}", evidence.snapshots, evidence.chain_images));
    said.join("; ")
}

fn print_findings(findings: &[DoctorFinding], out: &mut Output) {
    for finding in findings {
        let severity = match finding.severity {
            DoctorSeverity::Error => "error",
            DoctorSeverity::Warning => "warning",
            DoctorSeverity::Advice => "advice",
        };
        let code = finding.code.name();
        out.line(format!("  {severity:<8} {code}: {}", finding.message.replace('\n', " ")));
        if let Some(words) = &finding.mend {
            let words: Vec<String> = words.iter().map(|word| quoted_word(word)).collect();
            out.line(format!("           {}", words.join(" ")));
        }
    }
}

fn sum_up(report: &DoctorReport, out: &mut Output) {
    out.line(format!(
        "{}: {}, {}, {} of advice",
        counted(report.images.len() as u64, "image"),
        counted(report.errors, "error"),
        counted(report.warnings, "warning"),
        counted(report.advice, "piece"),
    ));
    print_findings(&report.findings, out);
    for orphan in &report.orphans {
        out.line(format!("orphan: {}", orphan.display()));
    }
}
