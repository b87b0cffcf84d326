//! The header: parsed from untrusted bytes and validated into a type that other modules may trust.
//!
//! Source: qcow2 specification, sections "Header" and "Header extensions".

mod fixed;
mod lasting;
pub(crate) mod rewrite;

use vdkit_block::{Codec, Error, Fault, HostOffset, Limits, Remedy, Result, Storage};
use zerocopy::{FromBytes, IntoBytes};

pub(crate) use self::lasting::{DiskTables, LastingHeader};
use crate::layout::{
    BACKING_NAME_BYTES_MAX, Geometry, MAGIC, V2_HEADER_BYTES, V3_HEADER_BYTES, autoclear,
    compatible, extension, incompatible,
};
use crate::structures::{
    BitmapsExtensionData, EncryptionExtensionData, ExtensionHead, FeatureName, FixedHeader,
    entries, header_offset,
};

/// How the guest data is encrypted, with the values of the header field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encryption {
    /// Not encrypted.
    None = 0,
    /// AES-CBC with the password as key; insecure.
    LegacyAes = 1,
    /// LUKS version 1.
    Luks = 2,
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

/// The structure of a [`Fault`] in the end of the list of header extensions.
pub(crate) const END_MARK: &str = "end of the header extensions";

/// With smaller clusters, a feature name table would leave no room for the backing name.
pub(crate) const FEATURE_NAMES_CLUSTER_MIN: u64 = 4096;

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
        Self::read_with(storage, limits, Some(faults))
    }

    fn read_with(
        storage: &dyn Storage,
        limits: &Limits,
        mut faults: Option<&mut Vec<Fault>>,
    ) -> Result<Self> {
        let (file, mut bytes) = (storage.name(), [0; FIRST_READ_BYTES]);
        let got = storage.read_up_to(&mut bytes, HostOffset(0))?;
        let first = &bytes[..got];
        let more = match Self::parse(file, first, storage.len()?, limits, faults.as_deref_mut()) {
            Ok(header) => return Ok(header),
            Err(NeedMore::Fault(error)) => return Err(error),
            Err(NeedMore::Bytes(more)) => more,
        };
        let mut bytes = vec![0; more];
        let got = storage.read_up_to(&mut bytes, HostOffset(0))?;
        if let Some(faults) = faults.as_deref_mut() {
            faults.clear(); // the second parse finds them again
        }
        match Self::parse(file, &bytes[..got], storage.len()?, limits, faults) {
            Ok(header) => Ok(header),
            Err(NeedMore::Fault(error)) => Err(error),
            // Another program is truncating the file.
            Err(NeedMore::Bytes(_)) => Err(Error::corrupt(
                file,
                got as u64,
                "header",
                "the end of the file",
                format!("{more} bytes"),
            )),
        }
    }

    fn parse(
        file: &str,
        bytes: &[u8],
        file_len: u64,
        limits: &Limits,
        mut faults: Option<&mut Vec<Fault>>,
    ) -> Result<Self, NeedMore> {
        let fixed = FixedHeader::parse(file, bytes)?;
        let mut header = fixed.validate(file, file_len, limits, faults.as_deref_mut())?;
        let there = Bytes { read: bytes, of: header.geometry.cluster_bytes().min(file_len) };
        let backing_offset = fixed.backing_file_offset.get();
        header.extensions = parse_extensions(file, there, &header, backing_offset, faults)?;
        if backing_offset != 0 {
            header.backing_name = parse_backing_name(file, there, &fixed, &header)?;
        }
        header.check_features(file)?;
        Ok(header)
    }

    /// The data of the first extension of a type.
    pub fn extension(&self, kind: u32) -> Option<&Extension> {
        self.extensions.iter().find(|e| e.kind == kind)
    }

    /// Host offset of the data of that extension; without it, where the extensions begin.
    pub(crate) fn extension_offset(&self, kind: u32) -> u64 {
        self.extension(kind).map_or(self.header_bytes.into(), |found| found.offset)
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
        let data = &self.extension(extension::BITMAPS)?.data;
        let (found, _) = BitmapsExtensionData::ref_from_prefix(data).ok()?;
        Some(BitmapsExtension {
            count: found.nb_bitmaps.get(),
            directory_bytes: found.bitmap_directory_size.get(),
            directory_offset: HostOffset(found.bitmap_directory_offset.get()),
        })
    }

    /// Host offset and byte length of the encryption header, if present.
    pub fn encryption_header(&self) -> Option<(HostOffset, u64)> {
        let data = &self.extension(extension::ENCRYPTION)?.data;
        let (found, _) = EncryptionExtensionData::ref_from_prefix(data).ok()?;
        Some((HostOffset(found.offset.get()), found.length.get()))
    }

    /// Whether an incompatible feature bit is set.
    pub fn has(&self, incompatible_bit: u64) -> bool {
        self.incompatible & incompatible_bit != 0
    }

    /// Fails if the image must not be written to.
    pub(crate) fn refuse_corrupt(&self, file: &str) -> Result<()> {
        if !self.has(incompatible::CORRUPT) {
            return Ok(());
        }
        Err(Error::corrupt(
            file,
            header_offset!(incompatible_features),
            "incompatible features",
            "the corrupt bit",
            "an image without known damage",
        )
        .with_remedy(Remedy::REPAIR))
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
        let table = self.extension(extension::FEATURE_NAMES);
        let table = table.map_or(&[][..], |e| entries::<FeatureName>(&e.data));
        let mut names = Vec::new();
        for bit in (0..64u8).filter(|b| bits >> b & 1 != 0) {
            let named = table.iter().find(|row| row.kind == kind && row.bit == bit);
            names.push(named.map_or_else(
                || format!("bit {bit}"),
                |row| {
                    let end = row.name.iter().position(|&b| b == 0).unwrap_or(row.name.len());
                    format!("bit {bit} ({})", String::from_utf8_lossy(&row.name[..end]))
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
            let (at, found) = (header_offset!(crypt_method), "AES with a data file");
            let expected = "no AES encryption of a data file";
            return Err(Error::corrupt(file, at, "crypt_method", found, expected));
        }
        Ok(())
    }

    /// The fixed fields, without the place of the backing name.
    fn fixed(&self) -> FixedHeader {
        FixedHeader {
            magic: MAGIC.into(),
            version: self.version.into(),
            cluster_bits: self.geometry.cluster_bits.into(),
            size: self.guest_bytes.into(),
            crypt_method: (self.encryption as u32).into(),
            l1_size: self.l1_entries.into(),
            l1_table_offset: self.l1_offset.0.into(),
            refcount_table_offset: self.refcount_table_offset.0.into(),
            refcount_table_clusters: self.refcount_table_clusters.into(),
            nb_snapshots: self.snapshot_count.into(),
            snapshots_offset: self.snapshots_offset.0.into(),
            incompatible_features: self.incompatible.into(),
            compatible_features: self.compatible.into(),
            autoclear_features: self.autoclear.into(),
            refcount_order: self.geometry.refcount_order.into(),
            header_length: V3_HEADER_BYTES.into(),
            compression_type: u8::from(self.codec == Codec::Zstd),
            ..FixedHeader::default()
        }
    }

    /// The header cluster of a new image: fixed fields, extensions, backing name.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they do not fit in one cluster.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let bytes = if self.version >= 3 { V3_HEADER_BYTES } else { V2_HEADER_BYTES } as usize;
        let mut fixed = self.fixed();
        let mut rest = Vec::new();
        rewrite::push_extensions(&mut rest, self.extensions.iter());
        if let Some(name) = &self.backing_name {
            rewrite::check_name(name)?;
            fixed.backing_file_offset.set((bytes + rest.len()) as u64);
            fixed.backing_file_size.set(name.len() as u32);
            rest.extend_from_slice(name.as_bytes());
        }
        let out = [&fixed.as_bytes()[..bytes], &rest[..]].concat();
        if out.len() as u64 > self.geometry.cluster_bytes() {
            return Err(Error::invalid(format!(
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
        let rows = rows.map(|(kind, bit, text)| {
            let mut name = [0; 46];
            name[..text.len()].copy_from_slice(text.as_bytes());
            FeatureName { kind, bit, name }
        });
        let data = rows.as_bytes().to_vec();
        Extension { kind: extension::FEATURE_NAMES, offset: 0, data }
    }
}

/// Durably writes feature bits to the header field at `at`.
pub(crate) fn write_features(storage: &dyn Storage, at: u64, bits: u64) -> Result<()> {
    storage.write_at(&bits.to_be_bytes(), HostOffset(at))?;
    storage.sync()
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

    /// What was expected of a range that the file ends before.
    fn beyond_file(self) -> String {
        format!("an end before that of the file, which has {:#x} bytes", self.of)
    }
}

fn parse_extensions(
    file: &str,
    bytes: Bytes<'_>,
    header: &Header,
    backing_offset: u64,
    faults: Option<&mut Vec<Fault>>,
) -> Result<Vec<Extension>, NeedMore> {
    let cluster = header.geometry.cluster_bytes();
    // The backing name may directly follow the list, without an end mark.
    let list_end = if backing_offset == 0 { cluster } else { backing_offset.min(cluster) };
    let mut at = u64::from(header.header_bytes);
    let mut found = Vec::new();
    loop {
        let data = at + size_of::<ExtensionHead>() as u64;
        if data > list_end {
            return Ok(found);
        }
        let head = bytes.get(at, data)?.map(ExtensionHead::ref_from_bytes);
        let Some(Ok(head)) = head else { return Ok(found) };
        let (kind, len) = (head.kind.get(), u64::from(head.length));
        if kind == extension::END {
            // QEMU does not open an image whose end mark has a length that exceeds the list.
            if let Some(faults) = faults.filter(|_| data + len > list_end) {
                faults.push(Fault {
                    file: file.to_owned(),
                    offset: at,
                    structure: END_MARK,
                    found: format!("an end mark of {len} bytes"),
                    expected: "one without bytes".to_owned(),
                    remedy: None,
                });
            }
            return Ok(found);
        }
        let fault = |expected: String| {
            let found = format!("{len} bytes of type {kind:#010x}");
            Err(Error::corrupt(file, at, "header extension", found, expected).into())
        };
        if data + len > list_end {
            return fault(format!("an end before {list_end:#x}"));
        }
        let Some(content) = bytes.get(data, data + len)? else {
            return fault(bytes.beyond_file());
        };
        found.push(Extension { kind, offset: data, data: content.to_vec() });
        at = data + len.next_multiple_of(8);
    }
}

fn parse_backing_name(
    file: &str,
    bytes: Bytes<'_>,
    fixed: &FixedHeader,
    header: &Header,
) -> Result<Option<String>, NeedMore> {
    let cluster = header.geometry.cluster_bytes();
    let (start, len) = (fixed.backing_file_offset.get(), u64::from(fixed.backing_file_size));
    if len == 0 {
        return Ok(None);
    }
    let fault = |at: u64, found: String, expected: String| {
        Err(Error::corrupt(file, at, "backing file name", found, expected).into())
    };
    let (field, place) =
        (header_offset!(backing_file_offset), format!("{len} bytes at {start:#x}"));
    let end = start.checked_add(len);
    if len > u64::from(BACKING_NAME_BYTES_MAX)
        || start < u64::from(V2_HEADER_BYTES)
        || end.is_none_or(|end| end > cluster)
    {
        let most = format!("at most {BACKING_NAME_BYTES_MAX} bytes within the first cluster");
        return fault(field, place, most);
    }
    let Some(name) = bytes.get(start, start + len)? else {
        return fault(field, place, bytes.beyond_file());
    };
    match std::str::from_utf8(name) {
        Err(_) => fault(start, "bytes that are not UTF-8".into(), "a name".into()),
        Ok(name) if name.contains('\0') => {
            fault(start, "a zero byte in the name".into(), "a name".into())
        }
        Ok(name) => Ok(Some(name.to_owned())),
    }
}
