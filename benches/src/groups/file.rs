//! Conversion to a real file, against every set of qemu-img's flags that may be its best, and
//! against copying the file as it is.

use anyhow::Result;

use super::Save;
use crate::images::{self, Image};
use crate::options::{Group, Options};
use crate::pair::{self, Candidate, CellName};
use crate::process::Program;
use crate::scratch::Scratch;

/// qemu-img's candidates for its best: name and flags.
const QEMU_FLAGS: [(&str, &[&str]); 4] = [
    ("qemu-img", &[]),
    ("qemu-img -m 16 -W", &["-m", "16", "-W"]),
    ("qemu-img -C", &["-C"]),
    ("qemu-img -t none -T none", &["-t", "none", "-T", "none"]),
];

/// From raw, qcow2, vmdk and vhdx to one another, of every classic image.
pub fn measure(options: &Options, scratch: &Scratch, save: &mut Save<'_>) -> Result<()> {
    for image in images::classic(options, scratch)? {
        let targets: &[&str] = match image.format {
            "raw" => &["qcow2", "vmdk", "vhdx"],
            "qcow2" => &["raw", "qcow2", "vmdk", "vhdx"],
            _ => &["raw", "qcow2"],
        };
        for &format in targets {
            let name = CellName {
                group: Group::File,
                job: format!("{}→{format}", image.format),
                content: image.content.to_owned(),
                file_system: scratch.file_system,
            };
            if !options.wants_job(&name.job) {
                continue;
            }
            let candidates = candidates(options, scratch, &image, format);
            let runs = options.runs(Group::File);
            save(pair::measure(name, options.image_bytes, scratch, runs, candidates)?)?;
        }
    }
    Ok(())
}

fn candidates(
    options: &Options,
    scratch: &Scratch,
    image: &Image,
    format: &'static str,
) -> Vec<Candidate> {
    let target = scratch.file("target");
    let candidate = |name, program, format| Candidate {
        name,
        program,
        cold: false,
        target: Some(target.clone()),
        proof: proof(options, image, &target, format),
        keep: None,
    };
    let vdkit = Program::new(&options.vdkit)
        .args(["convert", "-f", image.format, "-O", format])
        .args([&image.path, &target]);
    let mut candidates = vec![candidate("vdkit", vdkit, format)];
    for (name, flags) in QEMU_FLAGS {
        let qemu = Program::new(&options.qemu_img)
            .args(["convert", "-f", image.format, "-O", format])
            .args(flags)
            .args([&image.path, &target]);
        candidates.push(candidate(name, qemu, format));
    }
    let (name, how) = if scratch.file_system.reflinks() {
        ("cp --reflink", "--reflink=always")
    } else {
        ("cp", "--reflink=never")
    };
    let copy = Program::new("cp").arg(how).args([&image.path, &target]);
    candidates.push(candidate(name, copy, image.format));
    candidates
}

/// qemu-img finds the target equal to the source, and sound.
pub fn proof(
    options: &Options,
    image: &Image,
    target: &std::path::Path,
    format: &str,
) -> Vec<Program> {
    let mut proof = vec![
        Program::new(&options.qemu_img)
            .args(["compare", "-q", "-f", image.format, "-F", format])
            .args([&image.path, target]),
    ];
    if format != "raw" {
        proof.push(Program::new(&options.qemu_img).args(["check", "-q"]).arg(target));
    }
    proof
}
