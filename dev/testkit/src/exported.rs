//! What a server of a test serves.

use std::path::PathBuf;
use std::sync::Arc;

use vdkit_block::Storage;
use vdkit_chain::Disk;
use vdkit_qcow2::Qcow2Driver;
use vdkit_serve::{Export, ExportOptions};
use vdkit_testbase::assert_sound;

/// An export with the name `disk`, the qcow2 image under it, and a place for the server's socket.
#[derive(Debug)]
pub struct Exported {
    /// The export.
    pub export: Arc<Export>,
    /// The image.
    pub storage: Arc<dyn Storage>,
    /// The socket, in a folder of its own.
    pub socket: PathBuf,
    _folder: tempfile::TempDir,
}

impl Exported {
    /// Exports a disk over this storage; `change` changes the options.
    ///
    /// # Panics
    /// If no folder can be made.
    pub fn new(
        storage: Arc<dyn Storage>,
        disk: Disk,
        change: impl FnOnce(&mut ExportOptions),
    ) -> Self {
        let mut options = ExportOptions::default();
        options.name = "disk".to_owned();
        change(&mut options);
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        Self { export: Export::new(disk, options), storage, socket, _folder: folder }
    }

    /// Closes the export, and returns its sound image.
    ///
    /// # Panics
    /// If closing fails, or the image is damaged.
    pub fn end(self) -> Arc<dyn Storage> {
        self.export.close().unwrap();
        assert_sound(&Qcow2Driver, &self.storage, false, "the end");
        self.storage
    }
}
