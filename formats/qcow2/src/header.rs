//! The header: parsed from untrusted bytes and validated into a type that other modules may trust.
//!
//! Source: qcow2 specification, sections "Header" and "Header extensions".

mod fixed;
mod lasting;
pub(crate) mod rewrite;

use vdkit_block::bytes::{be32, be64};
use vdkit_block::{Codec, Error, Fault, HostOffset, Limits, Result, Storage};

use self::fixed::FixedFields;
pub(crate) use self::lasting::{DiskTables, LastingHeader};
use crate::layout::{
    BACKING_NAME_BYTES_MAX, Geometry, MAGIC, V2_HEADER_BYTES, V3_HEADER_BYTES, autoclear,
    compatible, extension, incompatible,
};

/// Byte offsets of header fields that are changed in place.
pub mod field {
    /// Virtual disk size in bytes, 64 bits.
    pub const SIZE: u64 = 24;
    /// Entries of the active L1 table, 32 bits; the table's offset, 64 bits, follows.
    pub const L1: u64 = 36;
    /// Offset of the refcount table, 64 bits; its clusters, 32 bits, follow.
    pub const REFCOUNT_TABLE: u64 = 48;
    /// Number of snapshots, 32 bits; the table's offset, 64 bits, follows.
    pub const SNAPSHOTS: u64 = 60;
    /// Incompatible feature bits, 64 bits.
    pub const INCOMPATIBLE: u64 = 72;
    /// Autoclear feature bits, 64 bits.
    pub const AUTOCLEAR: u64 = 88;
}

/// How the guest data is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encryption {
    /// Not encrypted.
    None,
    /// AES-CBC with the password as key; insecure.
    LegacyAes,
    /// LUKS version 1.
    Luks,
}

/// A header extension, as stored in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extension {
    /// The type; see [`crate::layout::extension`].
    pub kind: u32,
    /// Host offset of the data.
    pub offset: u64,
    /// The data without padding.
    pub data: Vec<u8>,
}

/// The bitmaps extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapsExtension {
    /// Entries of the directory.
    pub count: u32,
    /// Bytes of the directory.
    pub directory_bytes: u64,
    /// Host offset of the directory.
    pub directory_offset: HostOffset,
}

/// A validated header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// Sizes of clusters, entries and refcounts.
    pub geometry: Geometry,
    /// Bytes of the guest disk.
    pub guest_bytes: u64,
    /// How guest data is encrypted.
    pub encryption: Encryption,
    /// Host offset of the active L1 table.
    pub l1_offset: HostOffset,
    /// Entries of the active L1 table; may exceed what the disk needs.
    pub l1_entries: u32,
    /// Host offset of the refcount table.
    pub refcount_table_offset: HostOffset,
    /// Clusters of the refcount table.
    pub refcount_table_clusters: u32,
    /// Internal snapshots.
    pub snapshot_count: u32,
    /// Host offset of the snapshot table.
    pub snapshots_offset: HostOffset,
    /// See [`crate::layout::incompatible`].
    pub incompatible: u64,
    /// See [`crate::layout::compatible`].
    pub compatible: u64,
    /// See [`crate::layout::autoclear`].
    pub autoclear: u64,
    /// How compressed clusters are compressed.
    pub codec: Codec,
    /// Bytes of the fixed header, where the extensions begin.
    pub header_bytes: u32,
    /// Name of the backing file, as stored.
    pub backing_name: Option<String>,
    /// All extensions, in their order.
    pub extensions: Vec<Extension>,
}

/// Bytes of the first read: enough for nearly every header with its extensions. Only a page, since
/// opening an image reads the header several times.
const FIRST_READ_BYTES: usize = 4 << 10;

impl Header {
    /// Reads and validates the header: one read, or two if the extensions exceed 4 KiB.
    ///
    /// # Errors
    /// [`Error::Corrupt`] with offset, found and expected if a field violates the specification;
    /// [`Error::Unsupported`] for unknown incompatible features; [`Error::Limit`].
    pub fn read(storage: &dyn Storage, limits: &Limits) -> Result<Self> {
        Ok(Self::read_with(storage, limits, None)?.0)
    }

    /// As [`Header::read`], with the number of reads that it took.
    pub(crate) fn read_counting(storage: &dyn Storage, limits: &Limits) -> Result<(Self, u32)> {
        Self::read_with(storage, limits, None)
    }

    /// As [`Header::read`], for a check. If the refcount table or the snapshot table cannot be
    /// where the header says, the fault is added to `faults` and the returned header has none (no
    /// refcount table clusters, no snapshots), since a repair can rebuild both. If the header only
    /// has too many snapshots, the first of them are kept.
    pub(crate) fn read_tolerant(
        storage: &dyn Storage,
        limits: &Limits,
        faults: &mut Vec<Fault>,
    ) -> Result<Self> {
        Ok(Self::read_with(storage, limits, Some(faults))?.0)
    }

    fn read_with(
        storage: &dyn Storage,
        limits: &Limits,
        mut faults: Option<&mut Vec<Fault>>,
    ) -> Result<(Self, u32)> {
        let mut bytes = [0; FIRST_READ_BYTES];
        let got = storage.read_up_to(&mut bytes, HostOffset(0))?;
        let bytes = &bytes[..got];
        match Self::parse(storage.name(), bytes, storage.len()?, limits, faults.as_deref_mut()) {
            Err(NeedMore::Fault(error)) => Err(error),
            Ok(header) => Ok((header, 1)),
            Err(NeedMore::Bytes(more)) => {
                let mut bytes = vec![0; more];
                let got = storage.read_up_to(&mut bytes, HostOffset(0))?;
                bytes.truncate(got);
                if let Some(faults) = faults.as_deref_mut() {
                    faults.clear(); // the second parse finds them again
                }
                match Self::parse(storage.name(), &bytes, storage.len()?, limits, faults) {
                    Ok(header) => Ok((header, 2)),
                    Err(NeedMore::Fault(error)) => Err(error),
                    // Another program is truncating the file.
                    Err(NeedMore::Bytes(_)) => Err(Error::corrupt(
                        storage.name(),
                        got as u64,
                        "header",
                        "the end of the file",
                        format!("{more} bytes"),
                    )),
                }
            }
        }
    }

    fn parse(
        file: &str,
        bytes: &[u8],
        file_len: u64,
        limits: &Limits,
        faults: Option<&mut Vec<Fault>>,
    ) -> Result<Self, NeedMore> {
        let fixed = FixedFields::parse(file, bytes)?;
        let mut header = fixed.validate(file, file_len, limits, faults)?;
        let there = Bytes { read: bytes, of: header.geometry.cluster_bytes().min(file_len) };
        header.extensions = parse_extensions(file, there, &header, fixed.backing_offset)?;
        if fixed.backing_offset != 0 {
            header.backing_name = parse_backing_name(file, there, &fixed, &header)?;
        }
        header.check_features(file)?;
        Ok(header)
    }

    /// The data of the first extension of a type.
    pub fn extension(&self, kind: u32) -> Option<&Extension> {
        self.extensions.iter().find(|e| e.kind == kind)
    }

    /// The format name of the backing file, if stored.
    pub fn backing_format(&self) -> Option<String> {
        self.text_extension(extension::BACKING_FORMAT)
    }

    /// The name of the data file, if stored.
    pub fn data_file_name(&self) -> Option<String> {
        self.text_extension(extension::DATA_FILE)
    }

    fn text_extension(&self, kind: u32) -> Option<String> {
        self.extension(kind).map(|e| String::from_utf8_lossy(&e.data).into_owned())
    }

    /// The bitmaps extension, if present and long enough.
    pub fn bitmaps(&self) -> Option<BitmapsExtension> {
        let e = self.extension(extension::BITMAPS)?;
        (e.data.len() >= 24).then(|| BitmapsExtension {
            count: be32(&e.data, 0),
            directory_bytes: be64(&e.data, 8),
            directory_offset: HostOffset(be64(&e.data, 16)),
        })
    }

    /// Host offset and byte length of the encryption header, if present.
    pub fn encryption_header(&self) -> Option<(HostOffset, u64)> {
        let e = self.extension(extension::ENCRYPTION)?;
        (e.data.len() >= 16).then(|| (HostOffset(be64(&e.data, 0)), be64(&e.data, 8)))
    }

    /// Whether an incompatible feature bit is set.
    pub fn has(&self, incompatible_bit: u64) -> bool {
        self.incompatible & incompatible_bit != 0
    }

    /// Whether the guest data is in another file.
    pub fn has_data_file(&self) -> bool {
        self.has(incompatible::DATA_FILE)
    }

    /// Whether the data file can be read as a raw image.
    pub fn data_file_raw(&self) -> bool {
        self.has_data_file() && self.autoclear & autoclear::DATA_FILE_RAW != 0
    }

    /// Whether refcounts may be kept lazily.
    pub fn lazy_refcounts(&self) -> bool {
        self.version >= 3 && self.compatible & compatible::LAZY_REFCOUNTS != 0
    }

    /// The image's names of feature bits of a kind (0 incompatible, 1 compatible, 2 autoclear).
    pub(crate) fn feature_names(&self, kind: u8, bits: u64) -> String {
        let table = self.extension(extension::FEATURE_NAMES).map_or(&[][..], |e| &e.data[..]);
        let mut names = Vec::new();
        for bit in (0..64u8).filter(|b| bits >> b & 1 != 0) {
            let named = table.chunks_exact(48).find(|row| row[0] == kind && row[1] == bit);
            names.push(named.map_or_else(
                || format!("bit {bit}"),
                |row| {
                    let end = row[2..].iter().position(|&b| b == 0).unwrap_or(46);
                    format!("bit {bit} ({})", String::from_utf8_lossy(&row[2..2 + end]))
                },
            ));
        }
        names.join(", ")
    }

    fn check_features(&self, file: &str) -> Result<()> {
        let unknown = self.incompatible & !incompatible::KNOWN;
        if unknown != 0 {
            return Err(Error::unsupported(
                file,
                format!("unknown incompatible features: {}", self.feature_names(0, unknown)),
                "this image was made by newer software: use that to convert it",
            ));
        }
        if self.has_data_file() && self.encryption == Encryption::LegacyAes {
            return Err(Error::corrupt(
                file,
                32,
                "crypt_method",
                "AES with a data file",
                "no AES encryption of a data file",
            ));
        }
        Ok(())
    }

    /// The header cluster of a new image: fixed fields, extensions, backing name.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they do not fit in one cluster.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let v3 = self.version >= 3;
        let mut out = vec![0u8; if v3 { V3_HEADER_BYTES } else { V2_HEADER_BYTES } as usize];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC.to_be_bytes());
        put(4, &self.version.to_be_bytes());
        put(20, &self.geometry.cluster_bits.to_be_bytes());
        put(24, &self.guest_bytes.to_be_bytes());
        let crypt: u32 = match self.encryption {
            Encryption::None => 0,
            Encryption::LegacyAes => 1,
            Encryption::Luks => 2,
        };
        put(32, &crypt.to_be_bytes());
        put(36, &self.l1_entries.to_be_bytes());
        put(40, &self.l1_offset.0.to_be_bytes());
        put(48, &self.refcount_table_offset.0.to_be_bytes());
        put(56, &self.refcount_table_clusters.to_be_bytes());
        put(60, &self.snapshot_count.to_be_bytes());
        put(64, &self.snapshots_offset.0.to_be_bytes());
        if v3 {
            put(72, &self.incompatible.to_be_bytes());
            put(80, &self.compatible.to_be_bytes());
            put(88, &self.autoclear.to_be_bytes());
            put(96, &self.geometry.refcount_order.to_be_bytes());
            put(100, &V3_HEADER_BYTES.to_be_bytes());
            put(104, &[u8::from(self.codec == Codec::Zstd)]);
        }
        for e in &self.extensions {
            out.extend_from_slice(&e.kind.to_be_bytes());
            out.extend_from_slice(&(e.data.len() as u32).to_be_bytes());
            out.extend_from_slice(&e.data);
            out.resize(out.len().next_multiple_of(8), 0);
        }
        out.extend_from_slice(&[0; 8]); // the end of the list
        if let Some(name) = &self.backing_name {
            if name.len() > BACKING_NAME_BYTES_MAX as usize {
                return Err(Error::Invalid(format!(
                    "the backing file name has {} bytes, at most {BACKING_NAME_BYTES_MAX} are \
                     possible; use a relative name",
                    name.len()
                )));
            }
            let at = out.len() as u64;
            out[8..16].copy_from_slice(&at.to_be_bytes());
            out[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
            out.extend_from_slice(name.as_bytes());
        }
        if out.len() as u64 > self.geometry.cluster_bytes() {
            return Err(Error::Invalid(format!(
                "header, extensions and backing name take {} bytes, more than a cluster of {}; use \
                 a larger cluster_size or a shorter name",
                out.len(),
                self.geometry.cluster_bytes()
            )));
        }
        Ok(out)
    }

    /// The feature name table of new images.
    pub fn feature_name_table() -> Extension {
        let rows: [(u8, u8, &str); 8] = [
            (0, 0, "dirty bit"),
            (0, 1, "corrupt bit"),
            (0, 2, "external data file"),
            (0, 3, "compression type"),
            (0, 4, "extended L2 entries"),
            (1, 0, "lazy refcounts"),
            (2, 0, "bitmaps"),
            (2, 1, "raw external data"),
        ];
        let mut data = vec![0; rows.len() * 48];
        for (row, (kind, bit, name)) in data.chunks_exact_mut(48).zip(rows) {
            row[0] = kind;
            row[1] = bit;
            row[2..2 + name.len()].copy_from_slice(name.as_bytes());
        }
        Extension { kind: extension::FEATURE_NAMES, offset: 0, data }
    }
}

/// Why parsing stopped: a fault, or the first read was too short.
enum NeedMore {
    Bytes(usize),
    Fault(Error),
}

impl From<Error> for NeedMore {
    fn from(error: Error) -> Self {
        Self::Fault(error)
    }
}

/// Bytes read of the first cluster.
#[derive(Clone, Copy)]
struct Bytes<'a> {
    read: &'a [u8],
    /// Bytes that exist: those of the cluster, or of a shorter file.
    of: u64,
}

impl<'a> Bytes<'a> {
    /// The bytes of a range; `None` if the file ends before the range does.
    fn get(self, start: u64, end: u64) -> Result<Option<&'a [u8]>, NeedMore> {
        if end > self.of {
            return Ok(None);
        }
        match self.read.get(start as usize..end as usize) {
            Some(bytes) => Ok(Some(bytes)),
            None => Err(NeedMore::Bytes(self.of as usize)),
        }
    }
}

fn parse_extensions(
    file: &str,
    bytes: Bytes<'_>,
    header: &Header,
    backing_offset: u64,
) -> Result<Vec<Extension>, NeedMore> {
    let cluster = header.geometry.cluster_bytes();
    // The backing name may directly follow the list, without an end mark.
    let list_end = if backing_offset == 0 { cluster } else { backing_offset.min(cluster) };
    let mut at = u64::from(header.header_bytes);
    let mut found = Vec::new();
    loop {
        if at + 8 > list_end {
            return Ok(found);
        }
        let Some(head) = bytes.get(at, at + 8)? else { return Ok(found) };
        let (kind, len) = (be32(head, 0), u64::from(be32(head, 4)));
        if kind == extension::END {
            return Ok(found);
        }
        let data = at + 8;
        if data + len > list_end {
            return Err(Error::corrupt(
                file,
                at,
                "header extension",
                format!("{len} bytes of type {kind:#010x}"),
                format!("an end before {list_end:#x}"),
            )
            .into());
        }
        let Some(content) = bytes.get(data, data + len)? else {
            return Err(Error::corrupt(
                file,
                at,
                "header extension",
                format!("{len} bytes of type {kind:#010x}"),
                format!("an end before that of the file, which has {:#x} bytes", bytes.of),
            )
            .into());
        };
        found.push(Extension { kind, offset: data, data: content.to_vec() });
        at = data + len.next_multiple_of(8);
    }
}

fn parse_backing_name(
    file: &str,
    bytes: Bytes<'_>,
    fixed: &FixedFields,
    header: &Header,
) -> Result<Option<String>, NeedMore> {
    let cluster = header.geometry.cluster_bytes();
    let len = u64::from(fixed.backing_bytes);
    if len == 0 {
        return Ok(None);
    }
    let end = fixed.backing_offset.checked_add(len);
    if len > u64::from(BACKING_NAME_BYTES_MAX)
        || fixed.backing_offset < u64::from(V2_HEADER_BYTES)
        || end.is_none_or(|end| end > cluster)
    {
        return Err(Error::corrupt(
            file,
            8,
            "backing file name",
            format!("{len} bytes at {:#x}", fixed.backing_offset),
            format!("at most {BACKING_NAME_BYTES_MAX} bytes within the first cluster"),
        )
        .into());
    }
    let start = fixed.backing_offset;
    let Some(name) = bytes.get(start, start + len)? else {
        return Err(Error::corrupt(
            file,
            8,
            "backing file name",
            format!("{len} bytes at {start:#x}"),
            format!("an end before that of the file, which has {:#x} bytes", bytes.of),
        )
        .into());
    };
    let name = std::str::from_utf8(name).map_err(|_| {
        Error::corrupt(file, start, "backing file name", "bytes that are not UTF-8", "a name")
    })?;
    if name.contains('\0') {
        return Err(Error::corrupt(
            file,
            start,
            "backing file name",
            "a zero byte in the name",
            "a name",
        )
        .into());
    }
    Ok(Some(name.to_owned()))
}
