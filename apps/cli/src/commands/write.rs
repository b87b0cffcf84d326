//! `vdkit write`: writes guest bytes at an offset.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args, ValueHint};
use serde::Serialize;
use vdkit::stream::{ByteStream, Stdin};
use vdkit::{CancelToken, Disk, GuestOffset};

use super::{Run, Subcommand, runs};
use crate::arguments::{CacheOption, Force, Json, Writing, size};
use crate::failure::{Exit, Failure, Outcome, missing};
use crate::guard;
use crate::output::bytes_long;
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "write",
    about: "Write guest bytes at an offset",
    details: "\
The bytes come from stdin, from --input FILE, or from --pattern, --zero or --discard. They are \
durable when the command ends. An image that is recognized only as raw needs -f raw. An image with \
overlays in its folder needs --force.",
    examples: "
vdkit write disk.qcow2 1M < part.bin              from stdin
vdkit write disk.qcow2 1M --input part.bin        from a file
vdkit write disk.qcow2 0 64K --pattern 0xaa       64 KiB of one byte
vdkit write disk.qcow2 4G 1G --zero               zeroes, as metadata if possible
vdkit write disk.qcow2 4G 1G --discard            the guest no longer needs them
",
    ..runs::<WriteArgs>()
};

/// Bytes per write, and bytes zeroed between two checks for cancellation.
const STEP: usize = 1 << 20;
const ZERO_STEP: u64 = 1 << 30;

#[derive(Args, Debug)]
#[command(group = ArgGroup::new("made").args(["pattern", "zero", "discard"]).requires("length"))]
#[command(group = ArgGroup::new("source").args(["pattern", "zero", "discard", "input"]))]
pub struct WriteArgs {
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Start offset in bytes of the guest disk
    #[arg(value_name = "OFFSET", value_parser = size)]
    offset: u64,
    /// Number of bytes (default: all of the input)
    #[arg(value_name = "LENGTH", value_parser = size)]
    length: Option<u64>,
    /// Write this byte, such as 0xaa or 170, LENGTH times
    #[arg(long, value_name = "BYTE", value_parser = byte)]
    pattern: Option<u8>,
    /// Make LENGTH bytes read as zero, with as little writing as possible
    #[arg(long)]
    zero: bool,
    /// Discard LENGTH bytes; they then read as zero or as before
    #[arg(long)]
    discard: bool,
    /// Write the bytes of this file instead of stdin's ('-')
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    input: Option<PathBuf>,
    #[command(flatten)]
    force: Force,
    #[command(flatten)]
    cache: CacheOption,
    #[command(flatten)]
    opening: Writing,
    #[command(flatten)]
    json: Json,
}

/// What was written, in JSON.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct WriteAnswer {
    filename: String,
    offset: u64,
    length: u64,
}

fn byte(text: &str) -> Result<u8, String> {
    let parsed = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => u8::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("'{text}' is not a byte; write 0x00 to 0xff or 0 to 255"))
}

impl Run for WriteArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let options = self.opening.options().cache(self.cache.cache);
        let input = self.source()?;
        let cancel = CancelToken::default();
        guard::refuse_dependents(&self.image, self.force.force, "writing to it", &cancel)?;
        let disk = session.open(&self.image, &options)?;
        // When the input's length is not known, only the offset is checked here; the copy checks
        // the end.
        let range = super::guest_range(&disk, self.offset, self.length)?;
        let at = GuestOffset(range.start);
        let len = range.end - range.start;
        let cancel = session.cancel_on_signal()?;
        let written = match input {
            Some(input) => self.copy(&disk, input, len, &cancel),
            None => self.make(&disk, at, len, &cancel),
        };
        let length = super::closed(&disk, written)?;
        let filename = self.image.display().to_string();
        let answer = WriteAnswer { filename, offset: at.0, length };
        self.json.print(&answer, &mut session.out, |answer, out| {
            out.line(format!("wrote {} at offset {}", bytes_long(length), answer.offset))
        });
        Ok(Exit::Done)
    }
}

impl WriteArgs {
    /// The input, unless the command makes the bytes itself.
    fn source(&self) -> Result<Option<File>, Failure> {
        if self.pattern.is_some() || self.zero || self.discard {
            return Ok(None);
        }
        let opened = match self.input_file() {
            Some(path) => File::open(path),
            None => io::stdin().as_fd().try_clone_to_owned().map(File::from),
        };
        opened.map(Some).map_err(|error| {
            let name = self.input_name();
            Failure::failed(match error.kind() {
                io::ErrorKind::NotFound => missing(&name),
                _ => format!("{name}: cannot read: {error}"),
            })
        })
    }

    /// The input, if it is not stdin (`-`).
    fn input_file(&self) -> Option<&Path> {
        self.input.as_deref().filter(|path| *path != Path::new("-"))
    }

    fn input_name(&self) -> String {
        self.input_file().map_or("stdin".to_owned(), |path| path.display().to_string())
    }

    /// Writes `len` bytes that need no input: a pattern, zeroes or a discard.
    fn make(
        &self,
        disk: &Disk,
        at: GuestOffset,
        len: u64,
        cancel: &CancelToken,
    ) -> Result<u64, Failure> {
        let pattern = self.pattern.filter(|&byte| byte != 0).map(|byte| vec![byte; STEP]);
        let step = if pattern.is_some() { STEP as u64 } else { ZERO_STEP };
        let mut done = 0;
        while done < len {
            cancel.check()?;
            let part = step.min(len - done);
            match &pattern {
                Some(bytes) => disk.write_at(&bytes[..part as usize], at + done)?,
                None if self.discard => disk.discard(at + done, part)?,
                None => disk.write_zeroes(at + done, part, self.zero)?,
            }
            done += part;
        }
        Ok(len)
    }

    /// Copies the input: LENGTH bytes, or all of it. `room` is the space up to the end of the disk.
    fn copy(
        &self,
        disk: &Disk,
        input: File,
        room: u64,
        cancel: &CancelToken,
    ) -> Result<u64, Failure> {
        // Its reads notice a cancellation.
        let input = Stdin::from_file(input, cancel.clone());
        let mut input = ByteStream::new(self.input_name(), input);
        let mut buf = vec![0; STEP];
        let mut done = 0;
        loop {
            cancel.check()?;
            // Read one byte more than fits, to detect an input that is too long.
            let want = match self.length {
                Some(len) => (len - done).min(STEP as u64),
                None => (room - done).saturating_add(1).min(STEP as u64),
            } as usize;
            let got = input.read_full(&mut buf[..want])?;
            if got as u64 > room - done {
                return Err(Failure::usage(format!(
                    "{}: the input is longer than the {room} bytes from there to the end of the disk; \
                     its first {done} bytes were written",
                    self.image.display()
                )));
            }
            disk.write_at(&buf[..got], GuestOffset(self.offset) + done)?;
            done += got as u64;
            if got < want || self.length == Some(done) {
                break;
            }
        }
        cancel.check()?;
        match self.length {
            Some(len) if done < len => Err(Failure::failed(format!(
                "{}: ended after {done} bytes of {len}",
                self.input_name()
            ))),
            _ => Ok(done),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_decimal_or_hexadecimal() {
        assert_eq!(byte("0xaa"), Ok(0xaa));
        assert_eq!(byte("170"), Ok(170));
        assert_eq!(byte("0"), Ok(0));
        for text in ["256", "0x100", "-1", "", "x", "0x"] {
            assert!(byte(text).is_err(), "{text}");
        }
    }
}
