//! `vdkit mount`: makes an image's guest disk available as one plain file.

use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueHint};
use serde::Serialize;
use vdkit::CancelToken;
use vdkit::serve::{Export, ExportOptions, Scrape};

use super::{Run, Subcommand, runs};
use crate::arguments::Json;
use crate::failure::{Exit, Failure, Outcome, of_both};
use crate::fuse::{self, FuseOptions};
use crate::output::bytes_long;
use crate::serving::{DRAIN, ServedDisk, wait};
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "mount",
    about: "Mount an image's disk as one plain file, over FUSE",
    details: "\
FILE then is the guest disk, like a raw image: losetup, mount -o loop, fio, dd and every other \
program can read and write it, and fsync makes their writes durable. An existing FILE is hidden by \
the mount and unharmed; a missing one is created, and removed at the end.

The command runs until SIGINT, SIGTERM or `umount FILE`. Then it flushes everything and closes the \
image. SIGKILL loses nothing that was flushed but leaves FILE mounted: run `umount FILE`.

If the file system is full, writes wait until there is space again, so that programs that use the \
disk do not fail (--on-nospace report makes writes fail instead).",
    examples: "
vdkit mount disk.qcow2 disk.raw
vdkit mount --read-only --snapshot before-update disk.qcow2 old.raw
vdkit mount disk.qcow2 disk.raw & sleep 1; mount -o loop disk.raw /mnt
",
    ..runs::<MountArgs>()
};

#[derive(Args, Debug)]
pub struct MountArgs {
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// The file that becomes the disk
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    file: PathBuf,
    #[command(flatten)]
    fuse: FuseOptions,
    #[command(flatten)]
    disk: ServedDisk,
    #[command(flatten)]
    json: Json,
}

/// The JSON line printed once the file is mounted.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct MountAnswer {
    filename: String,
    file: String,
    virtual_size: u64,
    read_only: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<String>,
}

impl Run for MountArgs {
    fn run(self, session: &mut Session) -> Outcome {
        // Set up before anything that a signal would have to undo.
        let stop = session.cancel_on_signal()?;
        let disk = self.disk.open(session, &self.image, &stop)?;
        let filename = disk.name().to_owned();
        let mut options = ExportOptions::default();
        options.read_only = self.disk.read_only;
        options.on_nospace = self.disk.on_nospace;
        let export = Export::new(disk, options);
        let done = self.serve(&export, filename, &stop, session);
        // Close the export after a failure too, so that the image is marked clean.
        of_both(done, export.close())?;
        Ok(Exit::Done)
    }
}

impl MountArgs {
    /// Serves the file until the end.
    fn serve(
        &self,
        export: &Arc<Export>,
        filename: String,
        stop: &CancelToken,
        session: &mut Session,
    ) -> Result<(), Failure> {
        let metrics = self.disk.start_metrics(export)?;
        let server = fuse::mount(export, &self.file, self.fuse)?;
        let announced = self.announce(
            session,
            &MountAnswer {
                filename,
                file: server.file().display().to_string(),
                virtual_size: export.size(),
                read_only: export.read_only(),
                metrics: metrics.as_ref().map(Scrape::place),
            },
        );
        if announced.is_ok() {
            wait(export, stop, || server.finished());
        }
        drop(metrics);
        // Fail the writes that wait for space, because unmounting would wait for them.
        export.end_waiting();
        announced.and(fuse::unmount(server, DRAIN))
    }

    /// Reports that the file is mounted.
    fn announce(&self, session: &mut Session, answer: &MountAnswer) -> Result<(), Failure> {
        if self.json.json {
            // One line, because a program that waits for the mount reads up to the line feed.
            session.out.json_line(answer);
        } else {
            session.out.line(format!(
                "{}: {} at {}{}",
                answer.filename,
                bytes_long(answer.virtual_size),
                answer.file,
                if answer.read_only { ", read-only" } else { "" }
            ));
            if let Some(place) = &answer.metrics {
                session.out.line(format!("metrics at {place}"));
            }
        }
        session.out.finish()?;
        Ok(())
    }
}
