//! Encrypted images, LUKS with the default cipher (aes-256 in XTS mode): read, written over, and
//! made.
//!
//! qemu-img measures for more than a second how long a key of a new image shall take to derive,
//! which has nothing to do with the disk. So there are cells with targets that are there already.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::Save;
use crate::images;
use crate::options::{Content, Group, Options};
use crate::pair::{self, Candidate, CellName};
use crate::process::Program;
use crate::scratch::Scratch;

/// qemu-img's candidates for its best: name and flags.
const QEMU_FLAGS: [(&str, &[&str]); 2] =
    [("qemu-img", &[]), ("qemu-img -m 16 -W", &["-m", "16", "-W"])];

/// An encrypted format.
#[derive(Clone, Copy)]
struct Sealed {
    format: &'static str,
    /// What is before an option's name.
    prefix: &'static str,
    /// Options of a new image.
    options: &'static str,
}

const SEALED: [Sealed; 2] = [
    Sealed { format: "luks", prefix: "", options: "iter-time=10" },
    Sealed {
        format: "qcow2",
        prefix: "encrypt.",
        options: "encrypt.format=luks,encrypt.iter-time=10",
    },
];

/// Reading, writing over and making of each encrypted format.
pub fn measure(options: &Options, scratch: &Scratch, save: &mut Save<'_>) -> Result<()> {
    let raw = images::raw(options, scratch, Content::Full)?;
    let key = scratch.file("key");
    std::fs::write(&key, "a key of the benchmarks")?;
    let work = Work { options, scratch, raw, key };
    for sealed in SEALED {
        let image = work.make(sealed)?;
        for (job, candidates) in [
            (format!("{}→raw", sealed.format), work.reading(sealed, &image)),
            (format!("raw→{} there", sealed.format), work.writing_over(sealed, &image)),
            (format!("raw→{} new", sealed.format), work.making(sealed)),
        ] {
            if !options.wants_job(&job) {
                continue;
            }
            let content = Content::Full.name();
            let name = CellName::new(Group::Encryption, job, content, scratch.file_system);
            let runs = options.runs(Group::Encryption);
            save(pair::measure(name, options.image_bytes, scratch, runs, candidates)?)?;
        }
        std::fs::remove_file(image)?;
    }
    Ok(())
}

/// What all cells share.
struct Work<'a> {
    options: &'a Options,
    scratch: &'a Scratch,
    raw: PathBuf,
    key: PathBuf,
}

impl Work<'_> {
    fn vdkit(&self) -> Program {
        Program::new(&self.options.vdkit).arg("convert")
    }

    fn qemu(&self, subcommand: &str) -> Program {
        let secret = format!("secret,id=s,file={}", self.key.display());
        Program::new(&self.options.qemu_img).args([subcommand, "--object", &secret])
    }

    /// How qemu-img opens an encrypted image.
    fn opening(&self, sealed: Sealed, image: &Path) -> String {
        let Sealed { format, prefix, .. } = sealed;
        format!("driver={format},{prefix}key-secret=s,file.filename={}", image.display())
    }

    fn raw_opening(&self) -> String {
        format!("driver=raw,file.filename={}", self.raw.display())
    }

    /// An encrypted image with all the data.
    fn make(&self, sealed: Sealed) -> Result<PathBuf> {
        let image = self.scratch.file("sealed");
        self.qemu_making(sealed, &image, &[]).run().context("qemu-img convert")?;
        Ok(image)
    }

    fn qemu_making(&self, sealed: Sealed, target: &Path, flags: &[&str]) -> Program {
        let options = format!("{},{}key-secret=s", sealed.options, sealed.prefix);
        self.qemu("convert")
            .args(["-f", "raw", "-O", sealed.format, "-o", &options])
            .args(flags)
            .args([&self.raw, target])
    }

    fn reading(&self, sealed: Sealed, image: &Path) -> Vec<Candidate> {
        let target = self.scratch.file("target");
        let compare = || {
            let same = ["compare", "-q", "-f", "raw", "-F", "raw"];
            vec![Program::new(&self.options.qemu_img).args(same).args([&self.raw, &target])]
        };
        let candidate = |name, program| Candidate {
            target: Some(target.clone()),
            proof: compare(),
            ..Candidate::new(name, program)
        };
        let vdkit =
            self.vdkit().args(["-O", "raw", "--key-file"]).args([&self.key, image, &target]);
        let mut candidates = vec![candidate("vdkit", vdkit)];
        for (name, flags) in QEMU_FLAGS {
            let program = self.qemu("convert").args(flags).args(["--image-opts", "-O", "raw"]);
            candidates.push(candidate(name, program.arg(self.opening(sealed, image)).arg(&target)));
        }
        candidates
    }

    fn same(&self, sealed: Sealed, image: &Path) -> Vec<Program> {
        let images = [self.raw_opening(), self.opening(sealed, image)];
        vec![self.qemu("compare").args(["-q", "--image-opts"]).args(images)]
    }

    fn writing_over(&self, sealed: Sealed, image: &Path) -> Vec<Candidate> {
        let proof = || self.same(sealed, image);
        let candidate =
            |name, program| Candidate { proof: proof(), ..Candidate::new(name, program) };
        let vdkit = self
            .vdkit()
            .args(["-f", "raw", "-O", sealed.format, "--into", "--target-key-file"])
            .args([&self.key, &self.raw, image]);
        let mut candidates = vec![candidate("vdkit", vdkit)];
        for (name, flags) in QEMU_FLAGS {
            let program = self.qemu("convert").args(flags).args(["-n", "--image-opts"]);
            let opening = self.opening(sealed, image);
            let program = program.args(["--target-image-opts", &self.raw_opening(), &opening]);
            candidates.push(candidate(name, program));
        }
        candidates
    }

    fn making(&self, sealed: Sealed) -> Vec<Candidate> {
        let target = self.scratch.file("target");
        let candidate = |name, program| Candidate {
            target: Some(target.clone()),
            proof: self.same(sealed, &target),
            ..Candidate::new(name, program)
        };
        let vdkit = self
            .vdkit()
            .args(["-f", "raw", "-O", sealed.format, "-o", sealed.options, "--target-key-file"])
            .args([&self.key, &self.raw, &target]);
        let mut candidates = vec![candidate("vdkit", vdkit)];
        for (name, flags) in QEMU_FLAGS {
            candidates.push(candidate(name, self.qemu_making(sealed, &target, flags)));
        }
        candidates
    }
}
