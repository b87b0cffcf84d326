//! Creates a new image.
//!
//! The layout of a new image is known before its first byte is written, so no allocator is needed:
//! the offset of each table follows from the sizes, and each table entry from its index.
//!
//! ```text
//!   header │ refcount table │ refcount blocks │ L1 │ LUKS header │ L2 tables … │ guest data …
//!                                                  └ encrypted  ─┘└─ preallocated images only ─┘
//! ```
//!
//! With small clusters there are more refcount blocks than these clusters need: see
//! [`crate::growth`]. All tables are contiguous and precede the data, so a reader loads them with a
//! few large reads, and the guest data is one contiguous run.

use vdkit_block::{
    CreateRequest, Creation, Error, HostOffset, Limits, Measured, OptionSpec, Options, Result,
    Storage, ZeroMode, in_steps,
};
use zerocopy::IntoBytes;
use zerocopy::big_endian::U64;

use crate::driver::Qcow2Driver;
use crate::header::{Encryption, Extension, FEATURE_NAMES_CLUSTER_MIN, Header};
use crate::layout::{
    COPIED, Geometry, HOST_OFFSET_END, OFFSET_MASK, REFCOUNT_TABLE_BYTES_MAX, ZERO, autoclear,
    compatible, extension, incompatible,
};
use crate::measure::{self, GuestSizes, RefcountClusters};
use crate::options::{self, CreateOptions, ENCRYPT_FORMAT, Preallocation, SPECS};
use crate::refcounts::set_refcount;
use crate::structures::EncryptionExtensionData;

/// Bytes of one write of a table or of zeroes.
const STEP: u64 = 1 << 20;
/// Bytes of one write-zeroes request.
const ZERO_STEP: u64 = 256 << 20;

/// The layout, in clusters from the start of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    geometry: Geometry,
    guest: GuestSizes,
    refcounts: RefcountClusters,
    /// First cluster of the refcount table, directly after the header.
    refcount_table: u64,
    refcount_blocks: u64,
    l1: u64,
    /// The LUKS header with its key material.
    luks: u64,
    luks_bytes: u64,
    l2: u64,
    /// L2 tables to write: all or none.
    l2_tables: u64,
    data: u64,
    /// One past the last cluster of the file; all clusters before it are in use.
    end: u64,
}

impl Plan {
    fn new(options: &CreateOptions, guest: GuestSizes) -> Result<Self> {
        let geometry = options.geometry;
        let (l2_tables, data_clusters) = match options.preallocation {
            Preallocation::Off => (0, 0),
            _ if options.data_file.is_some() => (guest.l2_tables, 0),
            _ => (guest.l2_tables, guest.clusters),
        };
        let luks_bytes = options.encryption.map_or(0, |luks| luks.payload_offset());
        let luks_clusters = luks_bytes.div_ceil(geometry.cluster_bytes());
        let others = 1 + guest.l1_clusters + luks_clusters + l2_tables + data_clusters;
        let full_data = if options.data_file.is_some() { 0 } else { guest.clusters };
        let full = 1 + guest.l1_clusters + luks_clusters + guest.l2_tables + full_data;
        let refcounts = RefcountClusters::roomy(others, full, &geometry);
        let refcount_table = 1;
        let refcount_blocks = refcount_table + refcounts.table;
        let l1 = refcount_blocks + refcounts.blocks;
        let luks = l1 + guest.l1_clusters;
        let l2 = luks + luks_clusters;
        let data = l2 + l2_tables;
        let plan = Self {
            geometry,
            guest,
            refcounts,
            refcount_table,
            refcount_blocks,
            l1,
            luks,
            luks_bytes,
            l2,
            l2_tables,
            data,
            end: data + data_clusters,
        };
        plan.check_limits(options)?;
        Ok(plan)
    }

    fn check_limits(&self, options: &CreateOptions) -> Result<()> {
        let table_bytes = self.refcounts.table << self.geometry.cluster_bits;
        if table_bytes > REFCOUNT_TABLE_BYTES_MAX {
            return Err(Error::invalid(format!(
                "preallocation of {} bytes needs a refcount table of {table_bytes} bytes, more \
                 than {REFCOUNT_TABLE_BYTES_MAX}; use a larger cluster_size, fewer refcount_bits \
                 or preallocation=off",
                self.guest.bytes
            )));
        }
        let highest = match options.preallocation {
            Preallocation::Off => self.end,
            _ => self.end.max(self.guest.clusters),
        };
        if highest > HOST_OFFSET_END >> self.geometry.cluster_bits {
            return Err(Error::invalid(format!(
                "a disk of {} bytes cannot be preallocated: host offsets end at {HOST_OFFSET_END}; \
                 use preallocation=off",
                self.guest.bytes
            )));
        }
        Ok(())
    }

    fn bytes(&self, cluster: u64) -> HostOffset {
        HostOffset(cluster << self.geometry.cluster_bits)
    }

    fn header(&self, options: &CreateOptions) -> Header {
        let mut incompatible_bits = 0;
        let mut autoclear_bits = 0;
        let mut extensions = Vec::new();
        let mut name = |kind: u32, text: &str| {
            extensions.push(Extension { kind, offset: 0, data: text.as_bytes().to_vec() });
        };
        if let Some(format) = options.backing.as_ref().and_then(|b| b.format.as_ref()) {
            name(extension::BACKING_FORMAT, format);
        }
        if let Some(file) = &options.data_file {
            incompatible_bits |= incompatible::DATA_FILE;
            name(extension::DATA_FILE, file);
        }
        if options.encryption.is_some() {
            let place = EncryptionExtensionData {
                offset: self.bytes(self.luks).0.into(),
                length: self.luks_bytes.into(),
            };
            let data = place.as_bytes().to_vec();
            extensions.push(Extension { kind: extension::ENCRYPTION, offset: 0, data });
        }
        if options.data_file_raw {
            autoclear_bits |= autoclear::DATA_FILE_RAW;
        }
        if options.codec != vdkit_block::Codec::Deflate {
            incompatible_bits |= incompatible::COMPRESSION_TYPE;
        }
        if self.geometry.extended {
            incompatible_bits |= incompatible::EXTENDED_L2;
        }
        if options.version >= 3 && self.geometry.cluster_bytes() >= FEATURE_NAMES_CLUSTER_MIN {
            extensions.push(Header::feature_name_table());
        }
        Header {
            version: options.version,
            geometry: self.geometry,
            guest_bytes: self.guest.bytes,
            encryption: match options.encryption {
                Some(_) => Encryption::Luks,
                None => Encryption::None,
            },
            // A disk of no bytes has no L1 table.
            l1_offset: if self.guest.l1_clusters == 0 {
                HostOffset(0)
            } else {
                self.bytes(self.l1)
            },
            // At most 2^22, see `GuestSizes`.
            l1_entries: self.guest.l2_tables as u32,
            refcount_table_offset: self.bytes(self.refcount_table),
            // At most 8 MiB in clusters of 512 bytes, see `check_limits`.
            refcount_table_clusters: self.refcounts.table as u32,
            snapshot_count: 0,
            snapshots_offset: HostOffset(0),
            incompatible: incompatible_bits,
            compatible: if options.lazy_refcounts { compatible::LAZY_REFCOUNTS } else { 0 },
            autoclear: autoclear_bits,
            codec: options.codec,
            header_bytes: 0, // chosen by the encoder
            backing_name: options.backing.as_ref().map(|b| b.name.clone()),
            extensions,
        }
    }
}

impl Creation for Qcow2Driver {
    fn options(&self) -> &'static [OptionSpec] {
        SPECS
    }

    /// Truncates the files first, including the data file; on a device, overwrites the space that
    /// the image uses.
    fn create(&self, request: &CreateRequest) -> Result<()> {
        let options = CreateOptions::new(&request.options, request.backing.as_ref())?;
        let guest = GuestSizes::new(request.guest_bytes, &options.geometry)?;
        let plan = Plan::new(&options, guest)?;
        let header = plan.header(&options).encode()?;
        let storage = &*request.storage;
        let luks = match (options.encryption, request.options.key()) {
            (None, _) => None,
            (Some(luks), Some(key)) => Some(luks.make(storage.name(), key, &Limits::default())?),
            (Some(_), None) => return Err(Error::no_new_key(storage.name())),
        };
        let data_file = match (&options.data_file, request.files.first()) {
            (None, _) => None,
            (Some(_), Some(file)) => Some(&**file),
            (Some(name), None) => {
                return Err(Error::invalid(format!("the data file '{name}' was not opened")));
            }
        };
        let (data, end) = (plan.bytes(plan.data), plan.bytes(plan.end));
        storage.make_empty(end.0, data.0)?;
        preallocate(storage, data, end, options.preallocation)?;
        if let Some(file) = data_file {
            file.make_empty(guest.bytes, 0)?;
            preallocate(file, HostOffset(0), HostOffset(guest.bytes), options.preallocation)?;
        }
        write_tables(storage, &plan, &options)?;
        if let Some(luks) = luks {
            storage.write_at(&luks.bytes, plan.bytes(plan.luks))?;
        }
        // Written last, so that an incomplete image has no header. If a power failure reorders the
        // writes, creation has not yet been reported as successful.
        storage.write_at(&header, HostOffset(0))?;
        if let Some(file) = data_file {
            file.sync()?;
        }
        storage.sync()
    }

    fn new_files(&self, _: &str, _: u64, options: &Options) -> Result<Vec<String>> {
        Ok(options::text(options, "data_file").into_iter().collect())
    }

    fn encrypts(&self, options: &Options) -> bool {
        options.text(ENCRYPT_FORMAT).is_some()
    }

    fn cluster_bytes(&self, options: &Options) -> Result<u64> {
        Ok(CreateOptions::new(options, None)?.geometry.cluster_bytes())
    }

    fn measure(&self, guest_bytes: u64, options: &Options, data_clusters: u64) -> Result<Measured> {
        measure::measure(guest_bytes, options, data_clusters)
    }
}

/// Preallocates the guest data, `data..end`, of an empty image. All of it must then read as
/// zero, since the map declares it as data.
fn preallocate(
    storage: &dyn Storage,
    data: HostOffset,
    end: HostOffset,
    preallocation: Preallocation,
) -> Result<()> {
    let zero = |mode| in_steps(data, end, ZERO_STEP, |at, len| storage.write_zeroes(at, len, mode));
    match (preallocation, storage.caps().growable) {
        (Preallocation::Off, _) | (Preallocation::Metadata, true) => Ok(()),
        (Preallocation::Metadata, false) => zero(ZeroMode::MayUnmap),
        (Preallocation::Falloc, false) => zero(ZeroMode::KeepAllocated),
        // Also allocates the tables, so that no guest write can run out of space.
        (Preallocation::Falloc, true) => storage.allocate(HostOffset(0), end.0),
        (Preallocation::Full, _) => {
            let zeroes = vec![0; STEP as usize];
            in_steps(data, end, STEP, |at, len| storage.write_at(&zeroes[..len as usize], at))
        }
    }
}

/// Writes the refcount table, refcount blocks, L1 and L2 tables, except what is zero already.
fn write_tables(storage: &dyn Storage, plan: &Plan, options: &CreateOptions) -> Result<()> {
    let geometry = plan.geometry;
    let cluster = geometry.cluster_bytes();
    let blocks = plan.bytes(plan.refcount_blocks).0;
    write_words(storage, plan.bytes(plan.refcount_table), plan.refcounts.blocks, |i| {
        (blocks + i * cluster).into()
    })?;
    let per_word = 64 >> geometry.refcount_order;
    let all_one = refcount_word(per_word, geometry.refcount_order);
    write_words(storage, plan.bytes(plan.refcount_blocks), plan.end.div_ceil(per_word), |i| {
        match plan.end - i * per_word {
            ones if ones >= per_word => all_one,
            ones => refcount_word(ones, geometry.refcount_order),
        }
    })?;
    let l2 = plan.bytes(plan.l2).0;
    write_words(storage, plan.bytes(plan.l1), plan.l2_tables, |i| {
        ((l2 + i * cluster) | COPIED).into()
    })?;
    if plan.l2_tables == 0 {
        return Ok(());
    }
    // In a data file, each guest byte is at its own offset.
    let data = if options.data_file.is_some() { 0 } else { plan.bytes(plan.data).0 };
    // Unwritten space of an encrypted image decrypts to noise, so the map marks it as zero.
    let zero = if options.encryption.is_some() && !geometry.extended { ZERO } else { 0 };
    let entry = |i: u64| -> U64 {
        let host = data + i * cluster;
        debug_assert_eq!(host & !OFFSET_MASK, 0);
        (host | COPIED | zero).into()
    };
    if !geometry.extended {
        return write_words(storage, plan.bytes(plan.l2), plan.guest.clusters, entry);
    }
    let bitmap = subcluster_bitmap(options).into();
    write_words(storage, plan.bytes(plan.l2), plan.guest.clusters * 2, |i| {
        if i % 2 == 0 { entry(i / 2) } else { bitmap }
    })
}

/// The bitmap of each preallocated cluster that has subclusters.
///
/// With a backing file no subcluster may be allocated, since the backing file must remain visible.
/// Without one, it depends on the preallocation. If space was prepared too, subclusters are
/// allocated, so that guest writes change no metadata. If the data is a hole, they are marked zero,
/// so that readers learn from the map alone that all is zero (as QEMU does). A raw data file is the
/// disk, whatever it contains. In an encrypted image the map must mark everything as zero.
fn subcluster_bitmap(options: &CreateOptions) -> u64 {
    if options.encryption.is_some() {
        return if options.backing.is_none() { u64::from(u32::MAX) << 32 } else { 0 };
    }
    let prepared = matches!(options.preallocation, Preallocation::Falloc | Preallocation::Full);
    if options.backing.is_none() && (prepared || options.data_file_raw) {
        u32::MAX.into()
    } else {
        0
    }
}

/// Eight bytes of a refcount block that begin with `ones` refcounts of 1.
fn refcount_word(ones: u64, order: u32) -> U64 {
    let mut bytes = [0; 8];
    for index in 0..ones {
        set_refcount(&mut bytes, index, order, 1);
    }
    bytes.into()
}

/// Writes `count` words at `at` in large pieces.
fn write_words(
    storage: &dyn Storage,
    at: HostOffset,
    count: u64,
    word: impl Fn(u64) -> U64,
) -> Result<()> {
    let mut piece = Vec::with_capacity((count * 8).min(STEP) as usize);
    let mut index = 0;
    in_steps(at, at + count * 8, STEP, |at, len| {
        piece.clear();
        for i in index..index + len / 8 {
            piece.extend_from_slice(word(i).as_bytes());
        }
        index += len / 8;
        storage.write_at(&piece, at)
    })
}
