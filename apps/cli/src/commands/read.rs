//! `vdkit read`: prints guest bytes at an offset.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use vdkit::GuestOffset;

use super::{Run, Subcommand, runs};
use crate::arguments::{CacheOption, ParentOption, Reading, SnapshotOption, size};
use crate::failure::{Exit, Outcome};
use crate::hex::HexDump;
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "read",
    about: "Print guest bytes at an offset",
    details: "\
Prints the bytes that a guest reads: through the backing chain, decompressed, with zeroes where \
nothing is stored. They go to stdout unchanged, or as a hex dump with --hex.",
    examples: "
vdkit read disk.qcow2 0 512 --hex         the boot sector as a hex dump
vdkit read disk.qcow2 1M 64K > part.bin   64 KiB from offset 1 MiB
vdkit read disk.qcow2 1M | sha256sum      everything from there to the end
",
    ..runs::<ReadArgs>()
};

/// Bytes per read.
const STEP: u64 = 1 << 20;

#[derive(Args, Debug)]
pub struct ReadArgs {
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Start offset in bytes of the guest disk
    #[arg(value_name = "OFFSET", value_parser = size)]
    offset: u64,
    /// Number of bytes (default: up to the end)
    #[arg(value_name = "LENGTH", value_parser = size)]
    length: Option<u64>,
    /// Print a hex dump
    #[arg(long)]
    hex: bool,
    #[command(flatten)]
    cache: CacheOption,
    #[command(flatten)]
    snapshot: SnapshotOption,
    #[command(flatten)]
    parent: ParentOption,
    #[command(flatten)]
    opening: Reading,
}

impl Run for ReadArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let options = self
            .opening
            .options()
            .cache(self.cache.cache)
            .snapshot(self.snapshot.snapshot.clone())
            .backing(self.parent.choice());
        let disk = session.open(&self.image, &options)?;
        let range = super::guest_range(&disk, self.offset, self.length)?;
        let mut buf = vec![0; STEP.min(range.end - range.start) as usize];
        let mut dump = self.hex.then(HexDump::default);
        let mut at = range.start;
        while at < range.end && !session.out.unread() {
            // Cannot truncate: at most the buffer's length.
            let len = (range.end - at).min(STEP) as usize;
            disk.read_at(&mut buf[..len], GuestOffset(at))?;
            match &mut dump {
                Some(dump) => dump.print(at, &buf[..len], &mut session.out),
                None => session.out.bytes(&buf[..len]),
            }
            at += len as u64;
        }
        if let Some(dump) = dump {
            dump.end(at, &mut session.out);
        }
        Ok(Exit::Done)
    }
}
