//! Compression of a real file system's image, and reading compressed images back.

use std::path::PathBuf;

use anyhow::{Context, Result};

use super::Save;
use super::file::proof;
use crate::images::{self, Image};
use crate::options::{Group, Options};
use crate::pair::{self, Candidate, CellName};
use crate::process::Program;
use crate::scratch::Scratch;

const METHODS: [&str; 2] = ["zlib", "zstd"];

/// Both methods: to compress, and to read back what qemu-img and what vdkit compressed.
pub fn measure(options: &Options, scratch: &Scratch, save: &mut Save<'_>) -> Result<()> {
    let cells = cells();
    if !cells.iter().any(|(job, _)| options.wants_job(job)) {
        return Ok(());
    }
    let image = images::real(options, scratch)?;
    let guest_bytes = std::fs::metadata(&image.path)?.len();
    for (job, kind) in cells {
        if !options.wants_job(&job) {
            continue;
        }
        let candidates = match kind {
            Kind::Write { method } => write_candidates(options, scratch, &image, method),
            Kind::Read { method, maker, to_file } => {
                let packed = packed(options, scratch, &image, method, maker)?;
                read_candidates(options, scratch, &packed, to_file)
            }
        };
        let name = CellName::new(Group::Compress, job, image.content, scratch.file_system);
        let runs = options.runs(Group::Compress);
        save(pair::measure(name, guest_bytes, scratch, runs, candidates)?)?;
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Maker {
    Vdkit,
    Qemu,
}

#[derive(Clone, Copy)]
enum Kind {
    Write { method: &'static str },
    Read { method: &'static str, maker: Maker, to_file: bool },
}

/// Every job by name.
fn cells() -> Vec<(String, Kind)> {
    let mut cells = Vec::new();
    for method in METHODS {
        cells.push((format!("raw→{method}"), Kind::Write { method }));
    }
    for method in METHODS {
        for (maker, by) in [(Maker::Qemu, "qemu-img"), (Maker::Vdkit, "vdkit")] {
            for (to_file, to) in [(false, "null"), (true, "raw")] {
                // Who made it matters little to a reader; to a file, one maker is enough.
                if maker == Maker::Qemu || !to_file {
                    let kind = Kind::Read { method, maker, to_file };
                    cells.push((format!("{method} by {by}→{to}"), kind));
                }
            }
        }
    }
    cells
}

fn vdkit_writes(options: &Options, image: &Image, method: &str) -> Program {
    Program::new(&options.vdkit)
        .args(["convert", "-f", image.format, "-O", "qcow2"])
        .arg(format!("--compress={method}"))
        .arg(&image.path)
}

fn qemu_writes(options: &Options, image: &Image, method: &str) -> Program {
    Program::new(&options.qemu_img)
        .args(["convert", "-c", "-m", "16", "-W", "-f", image.format, "-O", "qcow2", "-o"])
        .arg(format!("compression_type={method}"))
        .arg(&image.path)
}

fn write_candidates(
    options: &Options,
    scratch: &Scratch,
    image: &Image,
    method: &str,
) -> Vec<Candidate> {
    let target = scratch.file("target");
    let candidate = |name, maker, program: Program| Candidate {
        target: Some(target.clone()),
        proof: proof(options, image, &target, "qcow2"),
        keep: Some(packed_path(scratch, maker, method)),
        ..Candidate::new(name, program.arg(&target))
    };
    vec![
        candidate("vdkit", Maker::Vdkit, vdkit_writes(options, image, method)),
        candidate("qemu-img -c -m 16 -W", Maker::Qemu, qemu_writes(options, image, method)),
    ]
}

/// Where a compressed image is kept.
fn packed_path(scratch: &Scratch, maker: Maker, method: &str) -> PathBuf {
    let name = match maker {
        Maker::Vdkit => "vdkit",
        Maker::Qemu => "qemu-img",
    };
    scratch.file(&format!("{name}.{method}.qcow2"))
}

/// The image compressed: kept from the cell that wrote it, or made now.
fn packed(
    options: &Options,
    scratch: &Scratch,
    image: &Image,
    method: &str,
    maker: Maker,
) -> Result<Image> {
    let program = match maker {
        Maker::Vdkit => vdkit_writes(options, image, method),
        Maker::Qemu => qemu_writes(options, image, method),
    };
    let path = packed_path(scratch, maker, method);
    if !path.exists() {
        eprintln!("making {}", path.display());
        program.arg(&path).run().context("cannot compress the real image")?;
    }
    Ok(Image { content: image.content, shape: "qcow2", format: "qcow2", path })
}

fn read_candidates(
    options: &Options,
    scratch: &Scratch,
    packed: &Image,
    to_file: bool,
) -> Vec<Candidate> {
    let vdkit = Program::new(&options.vdkit).args(["convert", "-f", "qcow2"]);
    let qemu = |flags: &[&str]| {
        Program::new(&options.qemu_img).args(["convert", "-f", "qcow2"]).args(flags)
    };
    if to_file {
        let target = scratch.file("target");
        let candidate = |name, program: Program| Candidate {
            target: Some(target.clone()),
            proof: proof(options, packed, &target, "raw"),
            ..Candidate::new(name, program.args(["-O", "raw"]).args([&packed.path, &target]))
        };
        return vec![
            candidate("vdkit", vdkit),
            candidate("qemu-img", qemu(&[])),
            candidate("qemu-img -m 16 -W", qemu(&["-m", "16", "-W"])),
        ];
    }
    let size = std::fs::metadata(scratch.file("real.raw")).map_or(0, |m| m.len());
    let null = format!("driver=null-co,size={size}");
    let to_null = |flags: &[&str]| {
        qemu(flags).arg("-n").arg(&packed.path).args(["--target-image-opts", &null])
    };
    vec![
        Candidate::new("vdkit", vdkit.arg(&packed.path).arg("null:")),
        Candidate::new("qemu-img", to_null(&[])),
        Candidate::new("qemu-img -m 16 -W", to_null(&["-m", "16", "-W"])),
    ]
}
