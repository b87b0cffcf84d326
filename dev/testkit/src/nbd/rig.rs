//! An NBD server over an image in memory.

use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use vdkit_block::Storage;
use vdkit_chain::Disk;
use vdkit_nbd::{Address, Exports, Listener, Server, ServerOptions};
use vdkit_serve::ExportOptions;
use vdkit_storage::MemoryStorage;
use vdkit_testbase::eventually;

use super::client::{Client, Style};
use crate::Exported;
use crate::disks::qcow2;

/// A server, and what it serves.
#[derive(Debug)]
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
        let exported = Exported::new(storage, disk, export);
        let mut options = ServerOptions::default();
        server(&mut options);
        let listener = Listener::bind(&Address::Unix(exported.socket.clone())).unwrap();
        let exports = Exports::new(vec![exported.export.clone()]);
        let server = Server::start(exports, vec![listener], options).unwrap();
        Self { server, exported }
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

    /// Waits until so many connections are left.
    pub fn settles_at(&self, connections: usize) {
        let what = format!("{connections} connections are left");
        eventually(&what, || self.server.connections() == connections);
    }

    /// Ends the service, and checks the image.
    pub fn end(self) -> Arc<dyn Storage> {
        self.end_within(Duration::from_secs(120))
    }

    /// As [`Rig::end`]; clients have so long, and are cut off then.
    pub fn end_within(self, drain: Duration) -> Arc<dyn Storage> {
        self.server.stop(drain);
        self.exported.end()
    }
}
