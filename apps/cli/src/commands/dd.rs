//! `vdkit dd`: copies a part of one disk to a part of another.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use vdkit::jobs::{self, DdOptions, DdPlan, NewImage};
use vdkit::{Disk, Monitor, OpenOptions};

use super::{Run, Subcommand, runs};
use crate::arguments::{CopySource, Force, FormatOptions, Json, ProgressOption, size};
use crate::failure::{Exit, Failure, Outcome};
use crate::guard;
use crate::keys::TargetKey;
use crate::output::bytes_long;
use crate::protocols;
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "dd",
    about: "Copy a part of one disk to a part of another",
    details: "\
Takes the operands of dd, for the guest disks of images:

  if=FILE      the source
  of=FILE      the target: a new image of just the necessary size, or an existing image,
               whose other bytes are kept
  bs=SIZE      bytes of a block (512)
  count=N      blocks to copy (all)
  skip=N       blocks to skip at the start of the source (0)
  seek=N       blocks to skip at the start of the target (0)
  conv=sparse  do not write zeroes into an existing target
  conv=nocreat the target must exist",
    examples: "
vdkit dd if=disk.qcow2 of=mbr.bin bs=512 count=1
vdkit dd if=part.raw of=disk.qcow2 bs=1M seek=1      into an existing image
vdkit dd if=disk.qcow2 of=tail.raw bs=1G skip=9      everything from 9 GiB on
",
    ..runs::<DdArgs>()
};

#[derive(Args, Debug)]
pub struct DdArgs {
    /// if=FILE, of=FILE, bs=SIZE, count=N, skip=N, seek=N, conv=WORD[,WORD]
    #[arg(value_name = "OPERAND", required = true, value_parser = OsStringValueParser::new().try_map(operand))]
    operands: Vec<Operand>,
    #[command(flatten)]
    source: CopySource,
    /// Format of the target (default: probed from its header; for a new image from the ending of
    /// its name, or raw)
    #[arg(short = 'O', long, value_name = "FORMAT")]
    target_format: Option<String>,
    #[command(flatten)]
    options: FormatOptions,
    #[command(flatten)]
    force: Force,
    #[command(flatten)]
    target_key: TargetKey,
    #[command(flatten)]
    progress: ProgressOption,
    #[command(flatten)]
    json: Json,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Operand {
    Source(PathBuf),
    Target(PathBuf),
    Block(u64),
    Count(u64),
    Skip(u64),
    Seek(u64),
    Conversions { sparse: bool, must_exist: bool },
}

fn operand(text: OsString) -> Result<Operand, String> {
    // A file name need not be UTF-8.
    let file = |key: &str| {
        let name = text.as_bytes().strip_prefix(key.as_bytes())?;
        Some(PathBuf::from(OsStr::from_bytes(name)))
    };
    if let Some(path) = file("if=") {
        return Ok(Operand::Source(path));
    }
    if let Some(path) = file("of=") {
        return Ok(Operand::Target(path));
    }
    let text = text.to_string_lossy();
    let (key, value) =
        text.split_once('=').ok_or_else(|| "operands have the form KEY=VALUE".to_owned())?;
    Ok(match key {
        "bs" => match size(value)? {
            0 => return Err("blocks must have at least one byte".to_owned()),
            bytes => Operand::Block(bytes),
        },
        "count" => Operand::Count(size(value)?),
        "skip" => Operand::Skip(size(value)?),
        "seek" => Operand::Seek(size(value)?),
        "conv" => conversions(value)?,
        _ => {
            return Err(format!("'{key}' is none of if, of, bs, count, skip, seek and conv"));
        }
    })
}

fn conversions(value: &str) -> Result<Operand, String> {
    let (mut sparse, mut must_exist) = (false, false);
    for word in value.split(',') {
        match word {
            "sparse" => sparse = true,
            "nocreat" => must_exist = true,
            // Accepted and ignored: an image is never truncated, and is durable when the command
            // ends.
            "notrunc" | "fsync" | "fdatasync" => {}
            _ => return Err(format!("'{word}' is none of sparse, nocreat, notrunc and fsync")),
        }
    }
    Ok(Operand::Conversions { sparse, must_exist })
}

/// All operands after parsing.
struct Request {
    source: PathBuf,
    target: PathBuf,
    options: DdOptions,
    must_exist: bool,
}

impl Request {
    fn of(operands: &[Operand]) -> Result<Self, Failure> {
        let (mut source, mut target, mut must_exist) = (None, None, false);
        let mut options = DdOptions::default();
        options.sync = true;
        for operand in operands {
            match operand.clone() {
                Operand::Source(path) => source = Some(path),
                Operand::Target(path) => target = Some(path),
                Operand::Block(bytes) => options.block_bytes = bytes,
                Operand::Count(blocks) => options.count = Some(blocks),
                Operand::Skip(blocks) => options.skip = blocks,
                Operand::Seek(blocks) => options.seek = blocks,
                Operand::Conversions { sparse, must_exist: must } => {
                    options.sparse |= sparse;
                    must_exist |= must;
                }
            }
        }
        let needed = |what: &str| Failure::usage(format!("{what}=FILE is needed"));
        Ok(Self {
            source: source.ok_or_else(|| needed("if"))?,
            target: target.ok_or_else(|| needed("of"))?,
            options,
            must_exist,
        })
    }
}

impl Run for DdArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let registry = vdkit::registry();
        let request = Request::of(&self.operands)?;
        super::refuse_itself(&request.source, &request.target)?;
        protocols::refuse_target(&request.target)?;
        let source = session.open(&request.source, &self.source.options())?;
        let progress = self.progress.reporter("dd");
        let monitor = Monitor::new(&progress).cancelled_by(session.cancel_on_signal()?);
        let into =
            request.must_exist || request.target.exists() || super::is_export(&request.target);
        let copied = if into {
            self.copy_into(&source, &request, &monitor)
        } else {
            let format = self.target_format.as_deref();
            let driver = super::target_driver(None, format, &request.target)?;
            let options = self.options.parse(driver, None, self.target_key.key())?;
            let new = NewImage::new(&request.target, driver.name()).options(options);
            jobs::dd_new(&registry, &source, &new, &request.options, &monitor)
                .map_err(Failure::from)
        };
        progress.finish();
        let report = copied.inspect_err(|_| {
            if into {
                super::warn_half_written(&request.target, &progress);
            }
        })?;
        self.json.print(&report, &mut session.out, |report, out| {
            let [copied, zero] = [report.copied_bytes, report.zero_bytes].map(bytes_long);
            out.line(format!("copied {copied}, of which {zero} were zero"))
        });
        Ok(Exit::Done)
    }
}

impl DdArgs {
    fn copy_into(
        &self,
        source: &Disk,
        request: &Request,
        monitor: &Monitor<'_>,
    ) -> Result<jobs::DdReport, Failure> {
        let options = ("-o", !self.options.options.is_empty());
        super::refuse_given(&[options], "here: the target exists")?;
        guard::refuse_dependents(
            &request.target,
            self.force.force,
            "writing to it",
            &monitor.cancel,
        )?;
        // A device's old content is no image header to trust.
        let device = super::is_device(&request.target);
        let format = self.target_format.clone().or(device.then(|| "raw".to_owned()));
        guard::refuse_occupied(&request.target, self.force.force, format.as_deref())?;
        self.target_key.refuse_for_plain(&request.target, format.as_deref())?;
        let CopySource { references, keys, .. } = &self.source;
        let writing = OpenOptions::read_write().maybe_format(format).refs(references.policy());
        let all = self.target_key.key().into_iter().cloned().chain(keys.all()).collect();
        let writing = keys.apply(writing).keys(all);
        let plan = DdPlan::new(source.guest_bytes(), &request.options)?;
        let target = Disk::open(&vdkit::registry(), &request.target, &writing)?;
        target.warnings().for_each(|warning| monitor.progress.message(warning));
        let copied = plan.run(source, &target, &request.options, monitor);
        super::closed(&target, copied)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands() {
        assert_eq!(operand("bs=1M".into()), Ok(Operand::Block(1 << 20)));
        assert_eq!(operand("if=a=b".into()), Ok(Operand::Source("a=b".into())));
        assert_eq!(
            operand("conv=notrunc,sparse".into()),
            Ok(Operand::Conversions { sparse: true, must_exist: false })
        );
        for text in ["bs", "bs=0", "bs=x", "status=none", "conv=ebcdic"] {
            assert!(operand(text.into()).is_err(), "{text}");
        }
    }
}
