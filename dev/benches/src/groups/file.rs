//! Conversion to a real file, against every set of qemu-img's flags that may be its best, and
//! against copying the file as it is.

use anyhow::Result;

use super::Save;
use crate::images::{self, Image, SHAPES, Shape};
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

/// From raw, qcow2, vmdk and vhdx to one another, of every classic image; with `--job` also from and to
/// VDI, fixed VHD and flat VMDK.
pub fn measure(options: &Options, scratch: &Scratch, save: &mut Save<'_>) -> Result<()> {
    for image in images::classic(options, scratch)? {
        for target in SHAPES.iter().filter(|target| pairs(image.shape, target.name)) {
            let job = format!("{}→{}", image.shape, target.name);
            let name = CellName::new(Group::File, job, image.content, scratch.file_system);
            if !options.wants_some_of(target) || !options.wants_job(&name.job) {
                continue;
            }
            let candidates = candidates(options, scratch, &image, target);
            let runs = options.runs(Group::File);
            save(pair::measure(name, options.image_bytes, scratch, runs, candidates)?)?;
        }
    }
    Ok(())
}

/// Each format from and to raw and qcow2.
pub fn pairs(from: &str, to: &str) -> bool {
    match from {
        "raw" => to != "raw",
        "qcow2" => true,
        _ => matches!(to, "raw" | "qcow2"),
    }
}

fn candidates(
    options: &Options,
    scratch: &Scratch,
    image: &Image,
    to: &'static Shape,
) -> Vec<Candidate> {
    let target = scratch.file("target");
    let candidate = |name, program, format| Candidate {
        target: Some(target.clone()),
        proof: proof(options, image, &target, format),
        ..Candidate::new(name, program)
    };
    let convert = |program: &std::path::Path, flags: &[&str]| {
        let mut program = Program::new(program)
            .args(["convert", "-f", image.format, "-O", to.format])
            .args(flags);
        if let Some(how) = to.options {
            program = program.args(["-o", how]);
        }
        program.args([&image.path, &target])
    };
    let mut candidates = vec![candidate("vdkit", convert(&options.vdkit, &[]), to.format)];
    for (name, flags) in QEMU_FLAGS {
        candidates.push(candidate(name, convert(&options.qemu_img, flags), to.format));
    }
    let (name, how) = if scratch.file_system.reflinks() {
        ("cp --reflink", "--reflink=always")
    } else {
        ("cp", "--reflink=never")
    };
    let data = image.data();
    // The data of a flat VMDK, alone, are a raw image.
    let format = if data == image.path { image.format } else { "raw" };
    let copy = Program::new("cp").arg(how).args([&data, &target]);
    candidates.push(candidate(name, copy, format));
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
    // It has no check for VHD.
    if !matches!(format, "raw" | "vpc") {
        proof.push(Program::new(&options.qemu_img).args(["check", "-q"]).arg(target));
    }
    proof
}
