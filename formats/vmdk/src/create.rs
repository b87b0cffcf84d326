//! Creates new images.

use std::path::Path;
use std::sync::Arc;

use vdkit_block::{
    BackingRef, CreateRequest, Creation, Error, Format, FormatDriver, HostOffset, Limits, Measured,
    OpenRequest, OptionSpec, Options, Result, Storage,
};

use crate::descriptor::{NO_PARENT, new_cid};
use crate::driver::VmdkDriver;
use crate::header::{SECTOR, SparseHeader, TABLE_ENTRIES, flag};
use crate::options::{NewVmdk, SPECS, Subformat, check_name, whole_sectors};
use crate::stream::StreamWriter;

/// Sectors of a grain: 64 KiB, as in VMware and QEMU.
pub(crate) const GRAIN_SECTORS: u64 = 128;
/// Least sectors reserved for an embedded descriptor.
const DESCRIPTOR_SECTORS: u64 = 20;
/// Most bytes of a descriptor without its extent lines, and of an extent line with a name of usual
/// length.
const DESCRIPTOR_BYTES: u64 = 512;
const EXTENT_LINE_BYTES: u64 = 128;
/// Most cylinders of an IDE disk.
const CYLINDERS_MAX: u64 = 16383;

impl Creation for VmdkDriver {
    fn options(&self) -> &'static [OptionSpec] {
        SPECS
    }

    fn create(&self, request: &CreateRequest) -> Result<()> {
        let new = NewVmdk::new(&request.options)?;
        if new.subformat == Subformat::Stream {
            return StreamWriter::begin(request, &Limits::default())?.close();
        }
        let storage = &*request.storage;
        let bytes = whole_sectors(request.guest_bytes, storage.name())?;
        let sizes = new.extents(bytes);
        let others = if new.subformat.is_one_file() { 0 } else { sizes.len() };
        if request.files.len() != others {
            return Err(Error::invalid_for(
                &storage.name(),
                format!("needs {others} other files, and {} were made", request.files.len()),
            ));
        }
        if new.subformat.is_flat() {
            let kind = format!("a {} image", new.subformat.create_type());
            let remedy = "its extents have no holes; create a monolithicSparse image";
            request.refuse_backing(&kind, remedy)?;
        }
        let text = descriptor(request, &new, bytes)?;
        if new.subformat == Subformat::MonolithicSparse {
            return sparse_extent(storage, bytes, new.zeroed_grain, Some(&text));
        }
        for (file, size) in request.files.iter().zip(sizes) {
            if new.subformat.is_flat() {
                file.set_len(size)?;
            } else {
                sparse_extent(&**file, size, new.zeroed_grain, None)?;
            }
        }
        storage.write_at(text.as_bytes(), HostOffset(0))
    }

    fn create_open(&self, request: &CreateRequest, limits: &Limits) -> Result<Arc<dyn Format>> {
        if NewVmdk::new(&request.options)?.subformat == Subformat::Stream {
            return Ok(StreamWriter::begin(request, limits)?);
        }
        self.create(request)?;
        self.open(OpenRequest {
            storage: request.storage.clone(),
            files: request.files.clone(),
            writable: true,
            limits: *limits,
        })
    }

    fn new_files(&self, image: &str, guest_bytes: u64, options: &Options) -> Result<Vec<String>> {
        NewVmdk::new(options)?.files(image, whole_sectors(guest_bytes, image)?)
    }

    fn writes_in_order(&self, options: &Options) -> bool {
        NewVmdk::new(options).is_ok_and(|new| new.subformat == Subformat::Stream)
    }

    fn cluster_bytes(&self, options: &Options) -> Result<u64> {
        let new = NewVmdk::new(options)?;
        Ok(if new.subformat.is_flat() { SECTOR } else { GRAIN_SECTORS * SECTOR })
    }

    /// All files together. A stream is counted as incompressible.
    fn measure(&self, guest_bytes: u64, options: &Options, data_clusters: u64) -> Result<Measured> {
        let new = NewVmdk::new(options)?;
        let bytes = whole_sectors(guest_bytes, "a VMDK image")?;
        if new.subformat.is_flat() {
            let all = bytes + 4096;
            return Ok(Measured { required: all, fully_allocated: all });
        }
        let grain = GRAIN_SECTORS * SECTOR;
        let sectors = descriptor_sectors(None);
        let extents = new.extents(bytes);
        // A separate file with a line for each extent, whose name is unknown here.
        let descriptor = if new.subformat.is_one_file() {
            0
        } else {
            DESCRIPTOR_BYTES + extents.len() as u64 * EXTENT_LINE_BYTES
        };
        let overhead: u64 = extents
            .iter()
            .map(|&size| sparse_header(size, new.zeroed_grain, sectors).overhead * SECTOR)
            .sum::<u64>()
            + descriptor;
        let grains = bytes.div_ceil(grain);
        // Each grain of a stream has a marker, and may not compress.
        let grain = if new.subformat == Subformat::Stream { grain + SECTOR } else { grain };
        let all = |count: u64| {
            count.min(grains).checked_mul(grain).and_then(|n| n.checked_add(overhead)).ok_or_else(
                || Error::invalid(format!("a VMDK image of {guest_bytes} bytes is too large")),
            )
        };
        Ok(Measured { required: all(data_clusters)?, fully_allocated: all(grains)? })
    }
}

pub(crate) fn descriptor(request: &CreateRequest, new: &NewVmdk, bytes: u64) -> Result<String> {
    let file = request.storage.name();
    let cid = new_cid(8, NO_PARENT)?;
    let mut parent = String::new();
    let mut parent_cid = NO_PARENT;
    if let Some(backing) = &request.backing {
        parent_cid = identity(file, backing)?;
        parent = format!("parentFileNameHint=\"{}\"\n", backing.name);
    }
    let mut lines = String::new();
    let names: Vec<&dyn Storage> = if new.subformat.is_one_file() {
        vec![&*request.storage]
    } else {
        request.files.iter().map(|file| &**file).collect()
    };
    for (storage, size) in names.into_iter().zip(new.extents(bytes)) {
        let name = base_name(storage.name());
        check_name(name)?;
        let sectors = size / SECTOR;
        if new.subformat.is_flat() {
            lines.push_str(&format!("RW {sectors} FLAT \"{name}\" 0\n"));
        } else {
            lines.push_str(&format!("RW {sectors} SPARSE \"{name}\"\n"));
        }
    }
    let ide = new.adapter == "ide";
    let heads = if ide { 16 } else { 255 };
    let cylinders = bytes / SECTOR / 63 / heads;
    let cylinders = if ide { cylinders.min(CYLINDERS_MAX) } else { cylinders };
    Ok(format!(
        "# Disk DescriptorFile\nversion=1\nCID={cid:08x}\nparentCID={parent_cid:08x}\n\
         createType=\"{}\"\n{parent}\n# Extent description\n{lines}\n# The Disk Data Base\n#DDB\n\n\
         ddb.virtualHWVersion = \"{}\"\nddb.geometry.cylinders = \"{cylinders}\"\n\
         ddb.geometry.heads = \"{heads}\"\nddb.geometry.sectors = \"63\"\n\
         ddb.adapterType = \"{}\"\nddb.toolsVersion = \"{}\"\n",
        new.subformat.create_type(),
        new.hardware,
        new.adapter,
        new.tools
    ))
}

/// The content id of a parent, which must be a VMDK image.
pub(crate) fn identity(file: &str, backing: &BackingRef) -> Result<u32> {
    check_name(&backing.name)?;
    let identity = backing.identity.as_deref();
    let known = identity.and_then(|id| u32::from_str_radix(id, 16).ok());
    let vmdk = backing.format.as_deref().is_none_or(|format| format == "vmdk");
    known.filter(|_| vmdk).ok_or_else(|| {
        Error::unsupported(
            file,
            format!("not supported: a parent ('{}') that is no VMDK image", backing.name),
            "a VMDK stands on a VMDK, whose content id it notes; use a qcow2 image",
        )
    })
}

/// The name of a file without its folders.
fn base_name(path: &str) -> &str {
    Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or("disk.vmdk")
}

/// Sectors reserved for a descriptor: room for a longer name or two more fields.
pub(crate) fn descriptor_sectors(text: Option<&str>) -> u64 {
    let bytes = text.map_or(0, |text| text.len() as u64 + 1024);
    bytes.div_ceil(SECTOR).max(DESCRIPTOR_SECTORS)
}

/// The header of a new sparse extent.
pub(crate) fn sparse_header(
    bytes: u64,
    zeroed_grain: bool,
    descriptor_sectors: u64,
) -> SparseHeader {
    let capacity = bytes / SECTOR;
    let tables = capacity.div_ceil(GRAIN_SECTORS * u64::from(TABLE_ENTRIES));
    let directory_sectors = (tables * 4).div_ceil(SECTOR);
    let table_sectors = tables * u64::from(TABLE_ENTRIES) * 4 / SECTOR;
    let redundant_directory = 1 + descriptor_sectors;
    let directory = redundant_directory + directory_sectors + table_sectors;
    let overhead = (directory + directory_sectors + table_sectors).next_multiple_of(GRAIN_SECTORS);
    let zero = if zeroed_grain { flag::ZERO_GRAIN } else { 0 };
    SparseHeader {
        version: if zeroed_grain { 2 } else { 1 },
        flags: flag::LINE_ENDS | flag::REDUNDANT | zero,
        capacity,
        grain_sectors: GRAIN_SECTORS,
        descriptor: 1,
        descriptor_sectors,
        table_entries: TABLE_ENTRIES,
        redundant_directory,
        directory,
        overhead,
        unclean: false,
        compression: 0,
    }
}

/// Writes an empty sparse extent: all its grain tables are allocated contiguously, and read as
/// zero.
fn sparse_extent(
    storage: &dyn Storage,
    bytes: u64,
    zeroed_grain: bool,
    text: Option<&str>,
) -> Result<()> {
    let header = sparse_header(bytes, zeroed_grain, descriptor_sectors(text));
    if !storage.caps().growable {
        return Err(Error::unsupported(
            storage.name(),
            "not supported: a sparse VMDK image on a device",
            "it grows as a file does; create it on a file system",
        ));
    }
    storage.set_len(header.overhead * SECTOR)?;
    let tables = header.directory_entries();
    let directory_sectors = (tables * 4).div_ceil(SECTOR);
    let table_sectors = u64::from(TABLE_ENTRIES) * 4 / SECTOR;
    for start in [header.redundant_directory, header.directory] {
        let first = start + directory_sectors;
        let sectors = (0..tables).map(|table| (first + table * table_sectors) as u32);
        let raw: Vec<u8> = sectors.flat_map(u32::to_le_bytes).collect();
        if !raw.is_empty() {
            storage.write_at(&raw, HostOffset(start * SECTOR))?;
        }
    }
    if let Some(text) = text {
        storage.write_at(text.as_bytes(), HostOffset(SECTOR))?;
    }
    storage.write_at(&header.encode(), HostOffset(0))
}
