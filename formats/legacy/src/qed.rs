//! QED: `docs/formats/qed.md`.

use vdkit_block::bytes::{le32, le64};
use vdkit_block::{DriverInfo, Error, Extent, ImageInfo, Limits, Place, Result, Storage};

use crate::read_only::{self, Map};
use crate::tables::Tables;

const HEADER_BYTES: usize = 64;
/// Feature bits.
const BACKING_FILE: u64 = 1;
const NEED_CHECK: u64 = 2;
const BACKING_RAW: u64 = 4;
const L1_ENTRY: &str = "L1 entry";
/// Entry of a zero cluster.
const ZERO: u64 = 1;

/// A validated header.
#[derive(Clone, Debug)]
pub(crate) struct Qed {
    cluster_bytes: u64,
    table_entries: u64,
    l1_at: u64,
    guest_bytes: u64,
    features: u64,
    first_cluster: u64,
    backing: Option<String>,
}

impl Qed {
    /// Checks an offset in a table: a multiple of the cluster size, after the header.
    fn judge(&self, storage: &dyn Storage, at: u64, what: &'static str, found: u64) -> Result<()> {
        if found.is_multiple_of(self.cluster_bytes)
            && found >= self.first_cluster
            && found <= i64::MAX as u64 - self.table_entries * 8
        {
            return Ok(());
        }
        let (found, expected) = (format!("{found:#x}"), "whole clusters, behind the header");
        Err(Error::corrupt(storage.name(), at, what, found, expected))
    }
}

impl Map for Qed {
    const INFO: DriverInfo = DriverInfo {
        name: "qed",
        aliases: &[],
        extensions: &["qed"],
        description: "QEMU enhanced disk, the format before qcow2 version 3, for reading",
    };

    const MAGICS: &'static [&'static [u8]] = &[b"QED\0"];

    fn describe(&self, info: &mut ImageInfo) {
        info.cluster_size = Some(self.cluster_bytes);
        info.backing_file = self.backing.clone();
        let raw = self.backing.is_some() && self.features & BACKING_RAW != 0;
        info.backing_format = raw.then(|| "raw".to_owned());
    }

    fn read(storage: &dyn Storage, _limits: &Limits) -> Result<Self> {
        let file = storage.name();
        let bytes = Self::header::<HEADER_BYTES>(storage, "'QED' and a zero")?;
        let corrupt = |at: u64, what, found: String, expected: &str| {
            Err(Error::corrupt(file, at, what, found, expected))
        };
        let cluster = le32(&bytes, 4);
        if !cluster.is_power_of_two() || !(4096..=64 << 20).contains(&cluster) {
            return corrupt(
                4,
                "cluster size",
                cluster.to_string(),
                "a power of two, 4 KiB to 64 MiB",
            );
        }
        let table = le32(&bytes, 8);
        if !table.is_power_of_two() || table > 16 {
            return corrupt(8, "table size", format!("{table} clusters"), "1, 2, 4, 8 or 16");
        }
        let features = le64(&bytes, 16);
        let unknown = features & !(BACKING_FILE | NEED_CHECK | BACKING_RAW);
        if unknown != 0 {
            return Err(Error::unsupported(
                file,
                format!("unknown feature bits {unknown:#x} of a QED image"),
                "no program is known to write them",
            ));
        }
        let cluster_bytes = u64::from(cluster);
        // At most 64 MiB times 16, an eighth.
        let table_entries = cluster_bytes * u64::from(table) / 8;
        let guest_bytes = le64(&bytes, 48);
        let most =
            u128::from(table_entries) * u128::from(table_entries) * u128::from(cluster_bytes);
        if !guest_bytes.is_multiple_of(512) || u128::from(guest_bytes) > most.min(i64::MAX as u128)
        {
            let expected = "whole sectors, at most what the tables can hold";
            return corrupt(48, "disk size", format!("{guest_bytes:#x}"), expected);
        }
        let l1_at = le64(&bytes, 40);
        let l1_end = l1_at.checked_add(table_entries * 8);
        if !l1_at.is_multiple_of(cluster_bytes)
            || l1_at == 0
            || l1_end.is_none_or(|end| end > i64::MAX as u64)
        {
            let expected = "whole clusters, behind the header";
            return corrupt(40, "L1 table", format!("an offset of {l1_at:#x}"), expected);
        }
        let first_cluster = u64::from(le32(&bytes, 12)).max(1) * cluster_bytes;
        let mut backing = None;
        if features & BACKING_FILE != 0 {
            let (at, len) = (le32(&bytes, 56).into(), le32(&bytes, 60));
            backing = Some(read_only::name(storage, at, len, 60)?);
        }
        Ok(Self {
            cluster_bytes,
            table_entries,
            l1_at,
            guest_bytes,
            features,
            first_cluster,
            backing,
        })
    }

    fn unclean(&self) -> Option<(u64, &'static str)> {
        (self.features & NEED_CHECK != 0).then_some((16, "features"))
    }

    fn guest_bytes(&self) -> u64 {
        self.guest_bytes
    }

    fn cluster_bytes(&self) -> u64 {
        self.cluster_bytes
    }

    fn host_aligned(&self) -> bool {
        true
    }

    fn table_bytes(&self) -> u64 {
        self.guest_bytes.div_ceil(self.cluster_bytes) * 8
    }

    fn spoiled(&self, at: u64, structure: &str) -> u64 {
        let table = if structure == L1_ENTRY { self.table_entries } else { 1 };
        (at / (self.cluster_bytes * table) + 1) * (self.cluster_bytes * table)
    }

    fn one(&self, storage: &dyn Storage, tables: &Tables, at: u64, len: u64) -> Result<Extent> {
        let cluster = self.cluster_bytes;
        let span = u128::from(cluster) * u128::from(self.table_entries);
        // The first index is within the table, since the size was checked.
        let (index, rest) = (u128::from(at) / span, u128::from(at) % span);
        let l1_entry = self.l1_at + index as u64 * 8;
        let l2_at = u64::from_le_bytes(tables.bytes(storage, l1_entry)?);
        if l2_at == 0 {
            let left = (span - rest).min(u128::from(len)) as u64;
            return Ok(Extent { len: left, place: Place::Hole });
        }
        self.judge(storage, l1_entry, L1_ENTRY, l2_at)?;
        let (within, index) = (at % cluster, rest as u64 / cluster);
        let len = (cluster - within).min(len);
        let entry_at = l2_at + index * 8;
        match u64::from_le_bytes(tables.bytes(storage, entry_at)?) {
            0 => Ok(Extent { len, place: Place::Hole }),
            ZERO => Ok(Extent { len, place: Place::Zero { allocated: false } }),
            offset => {
                self.judge(storage, entry_at, "L2 entry", offset)?;
                let run =
                    read_only::data(storage, entry_at, offset, within + len, self.first_cluster)?;
                Ok(run.advance(within))
            }
        }
    }
}
