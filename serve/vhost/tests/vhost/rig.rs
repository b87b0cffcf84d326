//! A server over an image in memory.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use vdkit_block::Storage;
use vdkit_qcow2::Qcow2Driver;
use vdkit_serve::{Export, ExportOptions};
use vdkit_storage::MemoryStorage;
use vdkit_vhost::{Listener, Server, ServerOptions};

use vdkit_testkit::assert_sound;
use vdkit_testkit::disks::qcow2;

use crate::guest::Guest;

pub struct Rig {
    pub export: Arc<Export>,
    pub storage: Arc<dyn Storage>,
    pub socket: PathBuf,
    server: Option<Server>,
    _folder: tempfile::TempDir,
}

impl Rig {
    pub fn new(guest_bytes: u64) -> Self {
        Self::with(Arc::new(MemoryStorage::new("image")), guest_bytes, |_| {})
    }

    pub fn with(
        storage: Arc<dyn Storage>,
        guest_bytes: u64,
        export: impl FnOnce(&mut ExportOptions),
    ) -> Self {
        let disk = qcow2(storage.clone(), guest_bytes, "");
        let mut options = ExportOptions::default();
        options.name = "disk".to_owned();
        export(&mut options);
        let export = Export::new(disk, options);
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("vhost.sock");
        let mut rig = Self { export, storage, socket, server: None, _folder: folder };
        rig.serve();
        rig
    }

    fn serve(&mut self) {
        let listener = Listener::bind(&self.socket).unwrap();
        let options = ServerOptions::default();
        self.server = Some(Server::start(self.export.clone(), listener, options).unwrap());
    }

    /// Replaces the server by another one.
    pub fn restart(&mut self) {
        assert!(self.server.take().unwrap().stop(Duration::from_secs(120)));
        self.serve();
    }

    pub fn boot(&self, queues: u16) -> Guest {
        Guest::boot(&self.socket, queues)
    }

    /// Ends the service, and checks the image.
    pub fn end(mut self) -> Arc<dyn Storage> {
        assert!(self.server.take().unwrap().stop(Duration::from_secs(120)));
        assert!(!self.socket.exists(), "the socket's name stays behind");
        self.export.close().unwrap();
        assert_sound(&Qcow2Driver, &self.storage, false, "the end");
        self.storage.clone()
    }
}
