//! The fixed header fields and their validation.

use vdkit_block::{Codec, Error, Fault, HostOffset, Limits, Remedy, Result};

use super::{Encryption, Header, be32, be64, field};
use crate::layout::{
    self, CLUSTER_BITS, EXTENDED_CLUSTER_BITS_MIN, Geometry, HOST_OFFSET_END, MAGIC,
    V2_HEADER_BYTES, V3_HEADER_BYTES_MIN, incompatible,
};

/// Converts a validation error to a fault.
fn fault_of(file: &str, field: u64, error: Error) -> Fault {
    match error {
        Error::Corrupt(fault) => *fault,
        other => Fault {
            file: file.to_owned(),
            offset: field,
            structure: "header",
            found: other.to_string(),
            expected: "a table within the limits".to_owned(),
            remedy: None,
        },
    }
}

/// The fixed fields as in the file; only magic and version are checked.
pub(super) struct FixedFields {
    version: u32,
    pub(super) backing_offset: u64,
    pub(super) backing_bytes: u32,
    cluster_bits: u32,
    size: u64,
    crypt_method: u32,
    l1_entries: u32,
    l1_offset: u64,
    refcount_table_offset: u64,
    refcount_table_clusters: u32,
    snapshot_count: u32,
    snapshots_offset: u64,
    incompatible: u64,
    compatible: u64,
    autoclear: u64,
    refcount_order: u32,
    header_bytes: u32,
    compression_type: u8,
}

impl FixedFields {
    pub(super) fn parse(file: &str, bytes: &[u8]) -> Result<Self> {
        if bytes.len() < V2_HEADER_BYTES as usize {
            return Err(Error::corrupt(
                file,
                0,
                "header",
                format!("{} bytes", bytes.len()),
                format!("at least {V2_HEADER_BYTES} bytes"),
            ));
        }
        let magic = be32(bytes, 0);
        if magic != MAGIC {
            return Err(Error::corrupt(
                file,
                0,
                "magic",
                format!("{magic:#010x}"),
                format!("{MAGIC:#010x}"),
            ));
        }
        let version = be32(bytes, 4);
        if !(2..=3).contains(&version) {
            return Err(Error::unsupported(
                file,
                format!("not supported: qcow2 version {version}"),
                "versions 2 and 3 are known",
            ));
        }
        let v3 = version == 3;
        if v3 && bytes.len() < V3_HEADER_BYTES_MIN as usize {
            return Err(Error::corrupt(
                file,
                0,
                "header",
                format!("{} bytes", bytes.len()),
                format!("at least {V3_HEADER_BYTES_MIN} bytes"),
            ));
        }
        let header_bytes = if v3 { be32(bytes, 100) } else { V2_HEADER_BYTES };
        Ok(Self {
            version,
            backing_offset: be64(bytes, 8),
            backing_bytes: be32(bytes, 16),
            cluster_bits: be32(bytes, 20),
            size: be64(bytes, 24),
            crypt_method: be32(bytes, 32),
            l1_entries: be32(bytes, 36),
            l1_offset: be64(bytes, 40),
            refcount_table_offset: be64(bytes, 48),
            refcount_table_clusters: be32(bytes, 56),
            snapshot_count: be32(bytes, 60),
            snapshots_offset: be64(bytes, 64),
            incompatible: if v3 { be64(bytes, 72) } else { 0 },
            compatible: if v3 { be64(bytes, 80) } else { 0 },
            autoclear: if v3 { be64(bytes, 88) } else { 0 },
            refcount_order: if v3 { be32(bytes, 96) } else { 4 },
            header_bytes,
            compression_type: if v3 && header_bytes > 104 && bytes.len() > 104 {
                bytes[104]
            } else {
                0
            },
        })
    }

    pub(super) fn validate(
        &self,
        file: &str,
        file_len: u64,
        limits: &Limits,
        mut faults: Option<&mut Vec<Fault>>,
    ) -> Result<Header> {
        let geometry = self.geometry(file)?;
        let cluster = geometry.cluster_bytes();
        let encryption = self.encryption(file)?;
        // If the caller collects faults, a lost table counts as empty, and a table that is only too
        // long has the largest possible number of entries.
        let refcount_table = match (self.refcount_table(file, file_len, &geometry), &mut faults) {
            (Err(error), Some(faults)) => {
                faults.push(fault_of(file, field::REFCOUNT_TABLE, error));
                (HostOffset(0), 0)
            }
            (offset, _) => (offset?, self.refcount_table_clusters),
        };
        let snapshots = match (self.snapshots(file, file_len, &geometry), &mut faults) {
            (Err(error), Some(faults)) => {
                faults.push(fault_of(file, field::SNAPSHOTS, error));
                let at = self.snapshots_offset;
                if at & (cluster - 1) == 0 && at >= cluster && at < file_len.min(HOST_OFFSET_END) {
                    (HostOffset(at), self.snapshot_count.min(layout::SNAPSHOTS_MAX))
                } else {
                    (HostOffset(0), 0)
                }
            }
            (offset, _) => (offset?, self.snapshot_count),
        };
        Ok(Header {
            version: self.version,
            geometry,
            guest_bytes: self.size,
            encryption,
            l1_offset: self.l1(file, file_len, &geometry, limits)?,
            l1_entries: self.l1_entries,
            refcount_table_offset: refcount_table.0,
            refcount_table_clusters: refcount_table.1,
            snapshot_count: snapshots.1,
            snapshots_offset: snapshots.0,
            incompatible: self.incompatible,
            compatible: self.compatible,
            autoclear: self.autoclear,
            codec: self.codec(file)?,
            header_bytes: self.header_bytes,
            backing_name: None,
            extensions: Vec::new(),
        })
    }

    /// Validates cluster and table sizes, and that a disk of such clusters can have this size.
    fn geometry(&self, file: &str) -> Result<Geometry> {
        let fault = |offset: u64, what, found: String, expected: String| {
            Err(Error::corrupt(file, offset, what, found, expected))
        };
        if !CLUSTER_BITS.contains(&self.cluster_bits) {
            return fault(20, "cluster_bits", self.cluster_bits.to_string(), "9 to 21".into());
        }
        if self.refcount_order > 6 {
            return fault(96, "refcount_order", self.refcount_order.to_string(), "0 to 6".into());
        }
        let geometry = Geometry {
            cluster_bits: self.cluster_bits,
            extended: self.incompatible & incompatible::EXTENDED_L2 != 0,
            refcount_order: self.refcount_order,
        };
        if geometry.extended && self.cluster_bits < EXTENDED_CLUSTER_BITS_MIN {
            let found = self.cluster_bits.to_string();
            let expected = format!("at least {EXTENDED_CLUSTER_BITS_MIN} with extended L2 entries");
            return fault(20, "cluster_bits", found, expected);
        }
        let cluster = geometry.cluster_bytes();
        let v3_bytes = u64::from(V3_HEADER_BYTES_MIN)..=cluster;
        if self.version == 3 && !v3_bytes.contains(&self.header_bytes.into()) {
            let expected = format!("{V3_HEADER_BYTES_MIN} to {cluster}");
            return fault(100, "header_length", self.header_bytes.to_string(), expected);
        }
        if self.size > i64::MAX as u64 - cluster {
            return fault(24, "size", format!("{:#x}", self.size), "less than 2^63".into());
        }
        Ok(geometry)
    }

    fn encryption(&self, file: &str) -> Result<Encryption> {
        match self.crypt_method {
            0 => Ok(Encryption::None),
            1 => Ok(Encryption::LegacyAes),
            2 => Ok(Encryption::Luks),
            other => {
                let what = format!("not supported: encryption method {other}");
                Err(Error::unsupported(file, what, "none, AES and LUKS are known"))
            }
        }
    }

    fn codec(&self, file: &str) -> Result<Codec> {
        let declared = self.incompatible & incompatible::COMPRESSION_TYPE != 0;
        match (declared, self.compression_type) {
            (false, 0) => Ok(Codec::Deflate),
            (true, 1) => Ok(Codec::Zstd),
            (true, 0) | (false, 1) => Err(Error::corrupt(
                file,
                104,
                "compression_type",
                self.compression_type.to_string(),
                "a value that agrees with incompatible feature bit 3",
            )),
            (_, other) => Err(Error::unsupported(
                file,
                format!("not supported: compression type {other}"),
                "zlib (0) and zstd (1) are known",
            )),
        }
    }

    /// Checks that a table is cluster-aligned, after the header and within the file.
    fn table(
        file: &str,
        field: u64,
        what: &'static str,
        offset: u64,
        bytes: u64,
        file_len: u64,
        geometry: &Geometry,
    ) -> Result<HostOffset> {
        let cluster = geometry.cluster_bytes();
        if bytes == 0 {
            return Ok(HostOffset(offset));
        }
        if offset & (cluster - 1) != 0 || offset < cluster || offset >= HOST_OFFSET_END {
            return Err(Error::corrupt(
                file,
                field,
                what,
                format!("{offset:#x}"),
                format!("a multiple of {cluster:#x} behind the header"),
            ));
        }
        if offset.checked_add(bytes).is_none_or(|end| end > file_len) {
            return Err(Error::corrupt(
                file,
                field,
                what,
                format!("{bytes} bytes at {offset:#x}"),
                format!("a table within the file of {file_len} bytes"),
            ));
        }
        Ok(HostOffset(offset))
    }

    fn l1(
        &self,
        file: &str,
        file_len: u64,
        geometry: &Geometry,
        limits: &Limits,
    ) -> Result<HostOffset> {
        let bytes = u64::from(self.l1_entries) * 8;
        let limit = limits.table_bytes_max.min(layout::L1_BYTES_MAX);
        let needed = geometry.l1_entries_for(self.size);
        if needed.saturating_mul(8) > limit {
            return Err(Error::Limit {
                file: file.to_owned(),
                what: "the L1 table for this virtual size and cluster size, in bytes,",
                found: needed.saturating_mul(8),
                limit,
            });
        }
        if bytes > limit {
            return Err(Error::Limit {
                file: file.to_owned(),
                what: "the L1 table in bytes",
                found: bytes,
                limit,
            });
        }
        if u64::from(self.l1_entries) < needed {
            return Err(Error::corrupt(
                file,
                36,
                "l1_size",
                self.l1_entries.to_string(),
                format!("at least {needed} for {} bytes", self.size),
            ));
        }
        Self::table(file, 40, "L1 table offset", self.l1_offset, bytes, file_len, geometry)
    }

    fn refcount_table(&self, file: &str, file_len: u64, geometry: &Geometry) -> Result<HostOffset> {
        let bytes = u64::from(self.refcount_table_clusters) << geometry.cluster_bits;
        if bytes == 0 {
            return Err(Error::corrupt(file, 56, "refcount_table_clusters", "0", "at least 1")
                .with_remedy(Remedy::REPAIR));
        }
        if bytes > layout::REFCOUNT_TABLE_BYTES_MAX.max(geometry.cluster_bytes()) {
            return Err(Error::Limit {
                file: file.to_owned(),
                what: "the refcount table in bytes",
                found: bytes,
                limit: layout::REFCOUNT_TABLE_BYTES_MAX,
            });
        }
        Self::table(
            file,
            48,
            "refcount table offset",
            self.refcount_table_offset,
            bytes,
            file_len,
            geometry,
        )
    }

    fn snapshots(&self, file: &str, file_len: u64, geometry: &Geometry) -> Result<HostOffset> {
        if self.snapshot_count > layout::SNAPSHOTS_MAX {
            return Err(Error::Limit {
                file: file.to_owned(),
                what: "the number of snapshots",
                found: self.snapshot_count.into(),
                limit: layout::SNAPSHOTS_MAX.into(),
            });
        }
        // Each entry has at least 40 bytes.
        let bytes = u64::from(self.snapshot_count) * 40;
        Self::table(
            file,
            64,
            "snapshot table offset",
            self.snapshots_offset,
            bytes,
            file_len,
            geometry,
        )
    }
}
