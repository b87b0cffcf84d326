//! The end of a control socket.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use vdkit_block::{CancelToken, Error, Result};
use vdkit_serve::{
    Command, Committed, Control, Controller, Export, ExportOptions, ImageChain, Images,
};
use vdkit_storage::MemoryStorage;
use vdkit_testkit::disks::{MIB, qcow2};

/// Its commit goes on until it is cancelled.
#[derive(Debug)]
struct Endless;

impl Images for Endless {
    fn snapshot_external(&self, _export: &Export, overlay: &Path) -> Result<ImageChain> {
        Err(Error::invalid(overlay.display().to_string()))
    }

    fn commit(&self, export: &Export, _force: bool) -> Result<Committed> {
        let job = export.begin_job("commit")?;
        loop {
            job.cancel().check()?;
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

struct Rig {
    export: Arc<Export>,
    control: Control,
    socket: PathBuf,
    _folder: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let disk = qcow2(Arc::new(MemoryStorage::new("image")), MIB, "");
        let export = Export::new(disk, ExportOptions::default());
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control");
        let controller = Controller::new(export.clone(), CancelToken::default());
        let control = Control::start(&socket, controller.with_images(Arc::new(Endless))).unwrap();
        Self { export, control, socket, _folder: folder }
    }

    fn client(&self) -> UnixStream {
        let client = UnixStream::connect(&self.socket).unwrap();
        client.set_read_timeout(Some(crate::PATIENCE)).unwrap();
        client
    }
}

fn send(mut client: &UnixStream, command: &Command) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(command).unwrap();
    line.push(b'\n');
    client.write_all(&line)
}

#[test]
fn connections_end_with_their_control() {
    let rig = Rig::new();
    let client = rig.client();
    let (mut lines, mut answer) = (BufReader::new(&client), String::new());
    send(&client, &Command::Status).unwrap();
    lines.read_line(&mut answer).unwrap();
    assert!(answer.starts_with("{\"ok\":true"), "{answer}");
    drop(rig.control);
    assert_eq!(Arc::strong_count(&rig.export), 1, "a connection holds the export");
    // Fails, or is sent to nobody.
    let _ = send(&client, &Command::Pause);
    answer.clear();
    assert_eq!(lines.read_line(&mut answer).unwrap_or(0), 0, "{answer}");
    assert!(!rig.export.paused());
    rig.export.close().unwrap();
}

#[test]
fn a_running_job_ends_with_its_control() {
    let rig = Rig::new();
    let client = rig.client();
    send(&client, &Command::Commit { force: false }).unwrap();
    while rig.export.job().is_none() {
        std::thread::yield_now();
    }
    drop(rig.control);
    assert_eq!(rig.export.job(), None);
    let mut answer = String::new();
    BufReader::new(&client).read_line(&mut answer).unwrap();
    assert!(answer.contains("interrupted"), "{answer}");
    rig.export.begin_job("another").unwrap();
    rig.export.close().unwrap();
}

#[test]
fn a_client_that_does_not_read_delays_no_end_for_long() {
    let rig = Rig::new();
    let client = rig.client();
    client.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    // Until the answers fill the buffers, and then the commands do.
    while send(&client, &Command::Status).is_ok() {}
    drop(rig.control);
    assert_eq!(Arc::strong_count(&rig.export), 1);
    rig.export.close().unwrap();
}

#[test]
fn a_paused_export_is_flushed() {
    let rig = Rig::new();
    let controller = Controller::new(rig.export.clone(), CancelToken::default());
    rig.export.pause();
    controller.run(&Command::Flush).unwrap();
    drop(rig.control);
    rig.export.close().unwrap();
}
