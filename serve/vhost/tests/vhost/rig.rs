//! A server over an image in memory.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use vdkit_block::Storage;
use vdkit_serve::ExportOptions;
use vdkit_storage::MemoryStorage;
use vdkit_vhost::{Listener, Server, ServerOptions};

use vdkit_testkit::Exported;
use vdkit_testkit::disks::qcow2;

use crate::guest::Guest;

pub struct Rig {
    server: Server,
    exported: Exported,
}

impl Deref for Rig {
    type Target = Exported;
    fn deref(&self) -> &Exported {
        &self.exported
    }
}

fn serve(exported: &Exported) -> Server {
    let listener = Listener::bind(&exported.socket).unwrap();
    Server::start(exported.export.clone(), listener, ServerOptions::default()).unwrap()
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
        let exported = Exported::new(storage, disk, export);
        Self { server: serve(&exported), exported }
    }

    /// Replaces the server by another one.
    pub fn restart(self) -> Self {
        assert!(self.server.stop(Duration::from_secs(120)));
        Self { server: serve(&self.exported), exported: self.exported }
    }

    pub fn boot(&self, queues: u16) -> Guest {
        Guest::boot(&self.socket, queues)
    }

    /// Ends the service, and checks the image.
    pub fn end(self) -> Arc<dyn Storage> {
        assert!(self.server.stop(Duration::from_secs(120)));
        assert!(!self.exported.socket.exists(), "the socket's name stays behind");
        self.exported.end()
    }
}
