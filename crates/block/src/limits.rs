//! What an image may cost at most.

/// Bounds on the memory and work that an image from a stranger may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one top-level table (L1, grain directory, BAT).
    pub table_bytes_max: u64,
    /// Bytes of the table of a format's internal snapshots.
    pub snapshots_bytes_max: u64,
    /// Other files with guest data that one image may name.
    pub files_max: usize,
    /// Images in one backing chain.
    pub chain_depth_max: usize,
    /// Bytes of metadata cached for each image.
    pub cache_bytes: u64,
    /// Bytes of the packed and unpacked form of one compressed unit.
    pub packed_bytes_max: u64,
    /// Bytes of memory that a check may take for its table of references.
    pub check_bytes_max: u64,
    /// Rounds of key derivation that trying one passphrase on one key slot may take: a slot's
    /// iterations, times the hashes that its key is made of. Some ten million take a second.
    pub key_rounds_max: u64,
}

impl Default for Limits {
    /// 32 MiB tables and 64 MiB of snapshots (QEMU's own bounds), 4096 files of one image, 200 images, 32 MiB of cache, 8 MiB packed units, 2 GiB
    /// for a check (2 bytes a host cluster: 64 TiB of data in clusters of 64 KiB), 2^28 rounds a
    /// key slot (half a minute; QEMU asks for two seconds).
    fn default() -> Self {
        Self {
            table_bytes_max: 32 << 20,
            snapshots_bytes_max: 64 << 20,
            files_max: 4096,
            chain_depth_max: 200,
            cache_bytes: 32 << 20,
            packed_bytes_max: 8 << 20,
            check_bytes_max: 2 << 30,
            key_rounds_max: 1 << 28,
        }
    }
}
