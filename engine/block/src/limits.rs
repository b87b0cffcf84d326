//! Resource limits on images.

/// Limits on the memory and work that an untrusted image may demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of one top-level table (L1, grain directory, BAT).
    pub table_bytes_max: u64,
    /// Bytes of the internal snapshot table.
    pub snapshots_bytes_max: u64,
    /// Other files with guest data that one image may name.
    pub files_max: usize,
    /// Images in one backing chain.
    pub chain_depth_max: usize,
    /// Bytes of metadata cache per image.
    pub cache_bytes: u64,
    /// Bytes of one compressed unit, compressed or decompressed.
    pub compressed_bytes_max: u64,
    /// Bytes of memory for the reference table of a check, or of a change of snapshots.
    pub check_bytes_max: u64,
    /// Rounds of key derivation for one passphrase: the iterations of a key slot times the hashes that
    /// its key is made of. For opening an image, of all slots that are tried.
    pub key_rounds_max: u64,
}

impl Limits {
    /// 32 MiB tables and 64 MiB of snapshots (QEMU's own bounds), 4096 files per image, 200 images,
    /// 32 MiB of cache, 8 MiB compressed units, 2 GiB for a check (2 bytes per host cluster: 64 TiB
    /// of data in 64 KiB clusters), 2^28 rounds per key slot.
    pub const DEFAULT: Self = Self {
        table_bytes_max: 32 << 20,
        snapshots_bytes_max: 64 << 20,
        files_max: 4096,
        chain_depth_max: 200,
        cache_bytes: 32 << 20,
        compressed_bytes_max: 8 << 20,
        check_bytes_max: 2 << 30,
        key_rounds_max: 1 << 28,
    };
}

impl Default for Limits {
    /// [`Limits::DEFAULT`].
    fn default() -> Self {
        Self::DEFAULT
    }
}
