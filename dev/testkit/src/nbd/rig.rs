//! A server over an image in memory.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use vdkit_block::Storage;
use vdkit_chain::Disk;
use vdkit_nbd::{Address, Exports, Listener, Server, ServerOptions};
use vdkit_qcow2::Qcow2Driver;
use vdkit_serve::{Export, ExportOptions};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::assert_sound;

use super::client::{Client, Style};
use crate::disks::qcow2;

/// A server, its export and the image under it.
#[derive(Debug)]
pub struct Rig {
    /// What is served, as `disk`.
    pub export: Arc<Export>,
    /// The image.
    pub storage: Arc<dyn Storage>,
    /// Where it listens.
    pub socket: PathBuf,
    server: Option<Server>,
    _folder: tempfile::TempDir,
}

impl Rig {
    /// Serves an empty disk in memory.
    pub fn new(guest_bytes: u64) -> Self {
        Self::with(Arc::new(MemoryStorage::new("image")), guest_bytes, |_| {}, |_| {})
    }

    /// Serves an empty disk on this storage.
    pub fn with(
        storage: Arc<dyn Storage>,
        guest_bytes: u64,
        export: impl FnOnce(&mut ExportOptions),
        server: impl FnOnce(&mut ServerOptions),
    ) -> Self {
        let disk = qcow2(storage.clone(), guest_bytes, "");
        Self::over(storage, disk, export, server)
    }

    /// Serves this disk.
    pub fn over(
        storage: Arc<dyn Storage>,
        disk: Disk,
        export: impl FnOnce(&mut ExportOptions),
        server: impl FnOnce(&mut ServerOptions),
    ) -> Self {
        let mut options = ExportOptions::default();
        options.name = "disk".to_owned();
        export(&mut options);
        let mut server_options = ServerOptions::default();
        server(&mut server_options);
        let export = Export::new(disk, options);
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("nbd.sock");
        let listener = Listener::bind(&Address::Unix(socket.clone())).unwrap();
        let exports = Exports::new(vec![export.clone()]);
        let server = Server::start(exports, vec![listener], server_options).unwrap();
        Self { export, storage, socket, server: Some(server), _folder: folder }
    }

    /// A client.
    pub fn client(&self, style: Style) -> Client {
        Client::open(&self.socket, "disk", style)
    }

    /// A client that chose metadata contexts.
    pub fn client_with(&self, style: Style, contexts: &[&str]) -> Client {
        let mut client = Client::dial(&self.socket);
        client.put(&3u32.to_be_bytes());
        client.agree(style);
        assert_eq!(client.contexts(10, "disk", contexts).unwrap(), contexts);
        client.go("disk");
        client
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.socket
    }

    /// Connections now.
    pub fn connections(&self) -> usize {
        self.server.as_ref().unwrap().connections()
    }

    /// Waits until so many connections are left.
    pub fn settles_at(&self, connections: usize) {
        // Two minutes: a machine may have other things to do.
        for _ in 0..24_000 {
            if self.connections() == connections {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("{} connections instead of {connections}", self.connections());
    }

    /// Ends the service, and checks the image.
    pub fn end(self) -> Arc<dyn Storage> {
        self.end_within(Duration::from_secs(120))
    }

    /// As [`Rig::end`]; clients have so long, and are cut off then.
    pub fn end_within(mut self, drain: Duration) -> Arc<dyn Storage> {
        self.server.take().unwrap().stop(drain);
        self.export.close().unwrap();
        assert_sound(&Qcow2Driver, &self.storage, false, "the end");
        self.storage.clone()
    }
}
