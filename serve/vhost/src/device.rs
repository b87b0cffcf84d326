//! Device configuration and features of the guest's disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vdkit_serve::{Client, Export, Requests};

use crate::wire::CONFIG_MAX;

/// A sector of the virtio protocol, independent of the disk's block size.
pub const SECTOR_BYTES: u64 = 512;
/// Data segments per request: a queue of 128 descriptors, minus header and status.
const SEGMENTS: u32 = 126;
/// Ranges per discard or write-zeroes request.
pub const RANGES_MAX: u32 = 32;
/// Sectors per such range: 1 GiB, so that none occupies a thread for long.
pub const RANGE_SECTORS_MAX: u32 = 1 << 21;
/// Maximum queues of a disk.
pub const QUEUES_MAX: u16 = 64;
/// Maximum entries of a queue.
pub const QUEUE_SIZE_MAX: u16 = 1024;
/// Offset of the write cache switch.
const CONFIG_WRITEBACK: u32 = 32;

/// Device features.
pub mod feature {
    pub const SEG_MAX: u64 = 1 << 2;
    pub const RO: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const CONFIG_WCE: u64 = 1 << 11;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    /// Not for the guest: the vhost-user protocol features exist.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
}

/// The virtio disk of one connection.
#[derive(Debug)]
pub struct Device {
    pub export: Arc<Export>,
    /// The monitor's connection. Changes without space are retried only while it lasts.
    pub client: Arc<Client>,
    /// Features accepted by the guest's driver.
    acked: AtomicU64,
    /// The guest's write cache is on. The switch outlives connections: the monitor reports it when
    /// the guest sets it, but not on reconnecting or renegotiating features.
    pub writeback: Arc<AtomicBool>,
    /// Offered rings.
    pub queues: u16,
}

impl Device {
    pub fn new(
        export: Arc<Export>,
        client: Client,
        writeback: Arc<AtomicBool>,
        queues: u16,
    ) -> Self {
        Self { export, client: Arc::new(client), acked: AtomicU64::new(0), writeback, queues }
    }

    /// Requests of the monitor's guest.
    pub fn requests(&self) -> Requests<'_> {
        self.export.requests(&self.client)
    }

    /// Offered features.
    pub fn features(&self) -> u64 {
        let always = feature::SEG_MAX
            | feature::BLK_SIZE
            | feature::FLUSH
            | feature::TOPOLOGY
            | feature::CONFIG_WCE
            | feature::MQ
            | feature::INDIRECT_DESC
            | feature::EVENT_IDX
            | feature::PROTOCOL_FEATURES
            | feature::VERSION_1;
        if self.export.read_only() {
            always | feature::RO
        } else {
            always | feature::DISCARD | feature::WRITE_ZEROES
        }
    }

    pub fn acknowledge(&self, features: u64) {
        self.acked.store(features, Ordering::Relaxed);
    }

    /// Whether a write must be durable before it is answered: the driver has no flush, or has
    /// disabled the cache.
    pub fn writes_durable(&self) -> bool {
        let acked = self.acked.load(Ordering::Relaxed);
        let switches = acked & feature::CONFIG_WCE != 0;
        acked & feature::FLUSH == 0 || (switches && !self.writeback.load(Ordering::Relaxed))
    }

    /// Whole sectors of the disk; bytes after the last one are unreachable.
    pub fn sectors(&self) -> u64 {
        self.export.size() / SECTOR_BYTES
    }

    /// A part of the configuration space, zero where undefined. `None` beyond its end.
    pub fn config(&self, offset: u32, len: u32) -> Option<Vec<u8>> {
        let end = offset.checked_add(len).filter(|end| *end <= CONFIG_MAX)?;
        let mut space = [0; CONFIG_MAX as usize];
        let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
        let unit = self.export.fill_bytes().clamp(4096, 1 << 26);
        put(0, &self.sectors().to_le_bytes());
        put(12, &SEGMENTS.to_le_bytes());
        put(20, &(SECTOR_BYTES as u32).to_le_bytes());
        // Physical blocks of 4 KiB, and the image's unit of allocation as optimal request size.
        put(24, &[3]);
        put(26, &8_u16.to_le_bytes());
        put(28, &((unit / SECTOR_BYTES) as u32).to_le_bytes());
        put(32, &[u8::from(self.writeback.load(Ordering::Relaxed))]);
        put(34, &self.queues.to_le_bytes());
        if !self.export.read_only() {
            put(36, &RANGE_SECTORS_MAX.to_le_bytes());
            put(40, &RANGES_MAX.to_le_bytes());
            put(44, &((unit / SECTOR_BYTES) as u32).to_le_bytes());
            put(48, &RANGE_SECTORS_MAX.to_le_bytes());
            put(52, &RANGES_MAX.to_le_bytes());
            put(56, &[1]);
        }
        Some(space[offset as usize..end as usize].to_vec())
    }

    /// Handles a write to the configuration space: the write cache switch.
    pub fn set_config(&self, offset: u32, bytes: &[u8]) -> bool {
        let switch = offset == CONFIG_WRITEBACK && bytes.len() == 1;
        if switch {
            self.writeback.store(bytes[0] != 0, Ordering::Relaxed);
        }
        switch
    }

    /// The disk's serial number: at most 20 bytes.
    pub fn id(&self) -> [u8; 20] {
        let name = match self.export.name() {
            "" => "vdkit",
            name => name,
        };
        let mut id = [0; 20];
        let len = name.len().min(id.len());
        id[..len].copy_from_slice(&name.as_bytes()[..len]);
        id
    }
}
