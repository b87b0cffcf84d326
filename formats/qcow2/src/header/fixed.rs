//! The fixed header fields and their validation.

use vdkit_block::{Codec, Error, Fault, HostOffset, Limits, Remedy, Result, require_within};

use super::{Encryption, Header};
use crate::layout::{
    self, CLUSTER_BITS, EXTENDED_CLUSTER_BITS_MIN, Geometry, HOST_OFFSET_END, MAGIC,
    V2_HEADER_BYTES, V3_HEADER_BYTES_MIN, incompatible,
};
use crate::structures::{FixedHeader, SnapshotTableEntry, header_offset, padded};

/// The error for a field with a wrong value.
macro_rules! wrong {
    ($file:expr, $field:ident, $found:expr, $expected:expr) => {
        Error::corrupt($file, header_offset!($field), stringify!($field), $found, $expected)
    };
}

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

/// What tables must fit in.
struct Bounds<'a> {
    file: &'a str,
    file_len: u64,
    geometry: Geometry,
}

impl Bounds<'_> {
    /// Checks that a table is cluster-aligned, after the header and within the file.
    fn table(&self, field: u64, what: &'static str, offset: u64, bytes: u64) -> Result<HostOffset> {
        let cluster = self.geometry.cluster_bytes();
        let fault = |found, expected| Err(Error::corrupt(self.file, field, what, found, expected));
        if bytes == 0 {
            return Ok(HostOffset(offset));
        }
        if offset & (cluster - 1) != 0 || offset < cluster || offset >= HOST_OFFSET_END {
            let expected = format!("a multiple of {cluster:#x} behind the header");
            return fault(format!("{offset:#x}"), expected);
        }
        if offset.checked_add(bytes).is_none_or(|end| end > self.file_len) {
            let expected = format!("a table within the file of {} bytes", self.file_len);
            return fault(format!("{bytes} bytes at {offset:#x}"), expected);
        }
        Ok(HostOffset(offset))
    }
}

impl FixedHeader {
    /// Parses the fixed fields, and checks magic and version. Fields that this header does not have
    /// get their defaults.
    pub(super) fn parse(file: &str, bytes: &[u8]) -> Result<Self> {
        let need = |needed: u32| match bytes.len() {
            len if len >= needed as usize => Ok(()),
            len => {
                let expected = format!("at least {needed} bytes");
                Err(Error::corrupt(file, 0, "header", format!("{len} bytes"), expected))
            }
        };
        need(V2_HEADER_BYTES)?;
        let mut header: Self = padded(bytes);
        let magic = header.magic.get();
        if magic != MAGIC {
            return Err(wrong!(file, magic, format!("{magic:#010x}"), format!("{MAGIC:#010x}")));
        }
        match header.version.get() {
            2 => {
                header = padded(&bytes[..V2_HEADER_BYTES as usize]);
                header.refcount_order.set(4);
                header.header_length.set(V2_HEADER_BYTES);
            }
            3 => {
                need(V3_HEADER_BYTES_MIN)?;
                if header.header_length.get() <= V3_HEADER_BYTES_MIN {
                    header.compression_type = 0;
                }
            }
            version => {
                let what = format!("not supported: qcow2 version {version}");
                return Err(Error::unsupported(file, what, "versions 2 and 3 are known"));
            }
        }
        Ok(header)
    }

    pub(super) fn validate(
        &self,
        file: &str,
        file_len: u64,
        limits: &Limits,
        mut faults: Option<&mut Vec<Fault>>,
    ) -> Result<Header> {
        let bounds = Bounds { file, file_len, geometry: self.geometry(file)? };
        let cluster = bounds.geometry.cluster_bytes();
        let encryption = self.encryption(file)?;
        // If the caller collects faults, a lost table counts as empty, and a table that is only too
        // long has the largest possible number of entries.
        let refcount_table = match (self.refcount_table(&bounds), &mut faults) {
            (Err(error), Some(faults)) => {
                faults.push(fault_of(file, header_offset!(refcount_table_offset), error));
                (HostOffset(0), 0)
            }
            (offset, _) => (offset?, self.refcount_table_clusters.get()),
        };
        let snapshots = match (self.snapshots(&bounds), &mut faults) {
            (Err(error), Some(faults)) => {
                faults.push(fault_of(file, header_offset!(nb_snapshots), error));
                let at = self.snapshots_offset.get();
                if at & (cluster - 1) == 0 && at >= cluster && at < file_len.min(HOST_OFFSET_END) {
                    (HostOffset(at), self.nb_snapshots.get().min(layout::SNAPSHOTS_MAX))
                } else {
                    (HostOffset(0), 0)
                }
            }
            (offset, _) => (offset?, self.nb_snapshots.get()),
        };
        Ok(Header {
            version: self.version.get(),
            geometry: bounds.geometry,
            guest_bytes: self.size.get(),
            encryption,
            l1_offset: self.l1(&bounds, limits)?,
            l1_entries: self.l1_size.get(),
            refcount_table_offset: refcount_table.0,
            refcount_table_clusters: refcount_table.1,
            snapshot_count: snapshots.1,
            snapshots_offset: snapshots.0,
            incompatible: self.incompatible_features.get(),
            compatible: self.compatible_features.get(),
            autoclear: self.autoclear_features.get(),
            codec: self.codec(file)?,
            header_bytes: self.header_length.get(),
            backing_name: None,
            extensions: Vec::new(),
        })
    }

    /// Validates cluster and table sizes, and that a disk of such clusters can have this size.
    fn geometry(&self, file: &str) -> Result<Geometry> {
        let geometry = Geometry {
            cluster_bits: self.cluster_bits.get(),
            extended: self.incompatible_features.get() & incompatible::EXTENDED_L2 != 0,
            refcount_order: self.refcount_order.get(),
        };
        let bits = geometry.cluster_bits.to_string();
        if !CLUSTER_BITS.contains(&geometry.cluster_bits) {
            return Err(wrong!(file, cluster_bits, bits, "9 to 21"));
        }
        if geometry.refcount_order > 6 {
            let found = geometry.refcount_order.to_string();
            return Err(wrong!(file, refcount_order, found, "0 to 6"));
        }
        if geometry.extended && geometry.cluster_bits < EXTENDED_CLUSTER_BITS_MIN {
            let expected = format!("at least {EXTENDED_CLUSTER_BITS_MIN} with extended L2 entries");
            return Err(wrong!(file, cluster_bits, bits, expected));
        }
        let cluster = geometry.cluster_bytes();
        let header_bytes = u64::from(self.header_length);
        let possible = u64::from(V3_HEADER_BYTES_MIN)..=cluster;
        if self.version.get() == 3
            && !(possible.contains(&header_bytes) && header_bytes.is_multiple_of(8))
        {
            let expected = format!("a multiple of 8, {V3_HEADER_BYTES_MIN} to {cluster}");
            return Err(wrong!(file, header_length, header_bytes.to_string(), expected));
        }
        let size = self.size.get();
        if size > i64::MAX as u64 - cluster {
            return Err(wrong!(file, size, format!("{size:#x}"), "less than 2^63"));
        }
        Ok(geometry)
    }

    fn encryption(&self, file: &str) -> Result<Encryption> {
        match self.crypt_method.get() {
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
        let declared = self.incompatible_features.get() & incompatible::COMPRESSION_TYPE != 0;
        match (declared, self.compression_type) {
            (false, 0) => Ok(Codec::Deflate),
            (true, 1) => Ok(Codec::Zstd),
            (true, 0) | (false, 1) => {
                let expected = "a value that agrees with incompatible feature bit 3";
                Err(wrong!(file, compression_type, self.compression_type.to_string(), expected))
            }
            (_, other) => {
                let what = format!("not supported: compression type {other}");
                Err(Error::unsupported(file, what, "zlib (0) and zstd (1) are known"))
            }
        }
    }

    fn l1(&self, bounds: &Bounds<'_>, limits: &Limits) -> Result<HostOffset> {
        let bytes = u64::from(self.l1_size) * 8;
        let limit = limits.table_bytes_max.min(layout::L1_BYTES_MAX);
        let needed = bounds.geometry.l1_entries_for(self.size.get());
        let what = "the L1 table for this virtual size and cluster size, in bytes,";
        require_within(bounds.file, what, needed.saturating_mul(8), limit)?;
        require_within(bounds.file, "the L1 table in bytes", bytes, limit)?;
        if u64::from(self.l1_size) < needed {
            let expected = format!("at least {needed} for {} bytes", self.size);
            return Err(wrong!(bounds.file, l1_size, self.l1_size.to_string(), expected));
        }
        let offset = self.l1_table_offset.get();
        bounds.table(header_offset!(l1_table_offset), "L1 table offset", offset, bytes)
    }

    fn refcount_table(&self, bounds: &Bounds<'_>) -> Result<HostOffset> {
        let bytes = u64::from(self.refcount_table_clusters) << bounds.geometry.cluster_bits;
        if bytes == 0 {
            let error = wrong!(bounds.file, refcount_table_clusters, "0", "at least 1");
            return Err(error.with_remedy(Remedy::REPAIR));
        }
        let limit = layout::REFCOUNT_TABLE_BYTES_MAX;
        require_within(bounds.file, "the refcount table in bytes", bytes, limit)?;
        let offset = self.refcount_table_offset.get();
        bounds.table(header_offset!(refcount_table_offset), "refcount table offset", offset, bytes)
    }

    fn snapshots(&self, bounds: &Bounds<'_>) -> Result<HostOffset> {
        let (count, limit) = (u64::from(self.nb_snapshots), u64::from(layout::SNAPSHOTS_MAX));
        require_within(bounds.file, "the number of snapshots", count, limit)?;
        // Entries are longer by their names and extra data.
        let bytes = count * size_of::<SnapshotTableEntry>() as u64;
        let offset = self.snapshots_offset.get();
        bounds.table(header_offset!(snapshots_offset), "snapshot table offset", offset, bytes)
    }
}
