//! Small images of every format, valid and invalid, made byte by byte.

use std::sync::Arc;

use vdkit_block::{GuestOffset, Storage};
use vdkit_qcow2::Qcow2Driver;
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{create_image, disk_on};

const CLUSTER: usize = 64 << 10;

/// A valid image of 1 MiB with a little data.
pub fn qcow2() -> Vec<u8> {
    qcow2_with("compat=1.1", 1 << 20, &[7; 9000])
}

/// A valid image whose disk begins with these bytes.
pub fn qcow2_holding(data: &[u8]) -> Vec<u8> {
    qcow2_with("compat=1.1", 1 << 20, data)
}

/// A valid image with these options and these bytes at the start of its disk.
pub fn qcow2_with(options: &str, guest_bytes: u64, data: &[u8]) -> Vec<u8> {
    let memory = Arc::new(MemoryStorage::new("image"));
    let storage: Arc<dyn Storage> = memory.clone();
    create_image(&Qcow2Driver, storage.clone(), guest_bytes, options);
    if !data.is_empty() {
        let disk = disk_on(&Qcow2Driver, storage);
        disk.write_at(data, GuestOffset(0)).unwrap();
        disk.close().unwrap();
    }
    memory.to_vec()
}

/// Overwrites bytes of an image.
pub fn with(mut image: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
    image[at..at + bytes.len()].copy_from_slice(bytes);
    image
}

/// A valid qcow2 image with some bytes overwritten.
pub fn patched(at: usize, bytes: &[u8]) -> Vec<u8> {
    with(qcow2(), at, bytes)
}

/// A file that begins with these bytes.
pub fn start(magic: &[u8], len: usize) -> Vec<u8> {
    with(vec![0; len], 0, magic)
}

fn be32(image: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(image[at..at + 4].try_into().unwrap())
}

fn be64(image: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(image[at..at + 8].try_into().unwrap())
}

/// A qcow2 image with this backing file name.
pub fn backed(name: &str) -> Vec<u8> {
    let image = patched(8, &0x8000u64.to_be_bytes());
    let image = with(image, 16, &(name.len() as u32).to_be_bytes());
    with(image, 0x8000, name.as_bytes())
}

/// The end of the header extensions.
fn extensions_end(image: &[u8]) -> usize {
    let mut at = be32(image, 100) as usize;
    while be32(image, at) != 0 {
        at += 8 + (be32(image, at + 4) as usize).next_multiple_of(8);
    }
    at
}

/// Adds a header extension.
fn extended(image: Vec<u8>, kind: u32, data: &[u8]) -> Vec<u8> {
    let at = extensions_end(&image);
    let image = with(image, at, &kind.to_be_bytes());
    let image = with(image, at + 4, &(data.len() as u32).to_be_bytes());
    with(image, at + 8, data)
}

pub fn with_extension(kind: u32, data: &[u8]) -> Vec<u8> {
    extended(qcow2(), kind, data)
}

pub fn with_backing_format(image: Vec<u8>) -> Vec<u8> {
    extended(image, 0xe279_2aca, b"qcow2")
}

/// A bitmaps extension without its autoclear bit.
pub fn bitmaps_extension() -> [u8; 24] {
    let mut data = [0; 24];
    data[3] = 1;
    data
}

/// Host offset of the first L2 table.
fn l2(image: &[u8]) -> usize {
    (be64(image, be64(image, 40) as usize) & 0x00ff_ffff_ffff_fe00) as usize
}

/// An image whose one L2 table maps half a GiB to one cluster.
pub fn bomb() -> Vec<u8> {
    let mut image = qcow2_with("compat=1.1", 1 << 30, &[7; 9000]);
    let table = l2(&image);
    let entry = image[table..table + 8].to_vec();
    for index in 0..CLUSTER / 8 {
        image = with(image, table + index * 8, &entry);
    }
    image
}

pub fn leading_outside() -> Vec<u8> {
    let image = qcow2();
    let at = l2(&image);
    with(image, at + 8, &((1u64 << 63) | (1 << 40)).to_be_bytes())
}

/// Two guest clusters in one host cluster whose refcount is 1.
pub fn aliased() -> Vec<u8> {
    let image = qcow2();
    let at = l2(&image);
    let entry = image[at..at + 8].to_vec();
    with(image, at + 8, &entry)
}

/// A counted but unreferenced cluster at the end.
pub fn leaking() -> Vec<u8> {
    let mut image = qcow2();
    let clusters = image.len().div_ceil(CLUSTER);
    image.resize((clusters + 1) * CLUSTER, 0);
    let table = be64(&image, 48) as usize;
    let block = be64(&image, table) as usize;
    with(image, block + clusters * 2 + 1, &[1])
}

/// A snapshot in a cluster at the end with refcount 0.
pub fn with_snapshot(state_bytes: u32) -> Vec<u8> {
    let mut image = qcow2();
    let at = image.len().next_multiple_of(CLUSTER);
    image.resize(at + CLUSTER, 0);
    let (l1_offset, l1_entries) = (be64(&image, 40), be32(&image, 36));
    let mut entry = Vec::new();
    entry.extend(l1_offset.to_be_bytes());
    entry.extend(l1_entries.to_be_bytes());
    entry.extend([0, 1, 0, 3]);
    entry.extend([0; 16]);
    entry.extend(state_bytes.to_be_bytes());
    entry.extend([0; 4]);
    entry.extend(b"1old");
    let image = with(image, at, &entry);
    let image = with(image, 60, &1u32.to_be_bytes());
    with(image, 64, &(at as u64).to_be_bytes())
}

/// The text of a VMDK descriptor.
pub fn text(extents: &str, create_type: &str, parent: &str) -> String {
    format!(
        "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID={parent}\n\
         createType=\"{create_type}\"\n\n# Extent description\n{extents}\n\n\
         ddb.adapterType = \"ide\"\n"
    )
}

pub fn sound_text() -> String {
    text("RW 10 SPARSE \"disk.vmdk\"", "monolithicSparse", "ffffffff")
}

/// A standalone descriptor.
pub fn descriptor(extents: &str, create_type: &str) -> Vec<u8> {
    text(extents, create_type, "ffffffff").into_bytes()
}

/// A sparse VMDK of 10 sectors with this descriptor.
pub fn vmdk(descriptor: &str) -> Vec<u8> {
    let mut image = start(b"KDMV", 64 << 10);
    image[4..8].copy_from_slice(&1u32.to_le_bytes());
    image[12..20].copy_from_slice(&10u64.to_le_bytes());
    image[20..28].copy_from_slice(&128u64.to_le_bytes());
    image[28..36].copy_from_slice(&1u64.to_le_bytes());
    image[36..44].copy_from_slice(&20u64.to_le_bytes());
    image[56..64].copy_from_slice(&40u64.to_le_bytes());
    with(image, 512, descriptor.as_bytes())
}

/// A VMDK with its grain directory at the end, and a footer that matches (`honest`) or not.
pub fn vmdk_at_end(honest: bool) -> Vec<u8> {
    let image = vmdk(&sound_text());
    let header = image[..512].to_vec();
    let image = with(image, 56, &u64::MAX.to_le_bytes());
    let at = image.len() - 1024;
    let image = with(image, at, &header);
    if honest { image } else { with(image, at + 12, &99u64.to_le_bytes()) }
}

/// A VDI of 1 MiB with this type.
pub fn vdi(kind: u32) -> Vec<u8> {
    let mut image = vec![0; 8192];
    image[0x40..0x44].copy_from_slice(&0xbeda_107f_u32.to_le_bytes());
    image[0x44..0x48].copy_from_slice(&0x0001_0001u32.to_le_bytes());
    image[0x4c..0x50].copy_from_slice(&kind.to_le_bytes());
    image[0x154..0x158].copy_from_slice(&1024u32.to_le_bytes());
    image[0x170..0x178].copy_from_slice(&(1u64 << 20).to_le_bytes());
    image[0x180..0x184].copy_from_slice(&1u32.to_le_bytes());
    image
}

/// A VHD's footer.
pub fn vhd_footer(kind: u32, size: u64, header: u64) -> Vec<u8> {
    let mut footer = start(b"conectix", 512);
    footer[16..24].copy_from_slice(&header.to_be_bytes());
    footer[40..48].copy_from_slice(&size.to_be_bytes());
    footer[48..56].copy_from_slice(&size.to_be_bytes());
    footer[60..64].copy_from_slice(&kind.to_be_bytes());
    sum_up_vhd(&mut footer);
    footer
}

/// Updates a VHD footer's checksum.
pub fn sum_up_vhd(footer: &mut [u8]) {
    footer[64..68].fill(0);
    let sum = !footer[..512].iter().fold(0u32, |sum, byte| sum.wrapping_add((*byte).into()));
    footer[64..68].copy_from_slice(&sum.to_be_bytes());
}

/// A VHD of 1 MiB with a block allocation table.
pub fn vhd_dynamic(kind: u32) -> Vec<u8> {
    let footer = vhd_footer(kind, 1 << 20, 512);
    let mut image = vec![0; 8192];
    image[..512].copy_from_slice(&footer);
    image[512..520].copy_from_slice(b"cxsparse");
    image[528..536].copy_from_slice(&1536u64.to_be_bytes());
    image[540..544].copy_from_slice(&1u32.to_be_bytes());
    image[8192 - 512..].copy_from_slice(&footer);
    image
}

/// A VHDX of this size.
pub fn vhdx(parent: bool, size: u64) -> Vec<u8> {
    const MIB: usize = 1 << 20;
    let mut image = start(b"vhdxfile", 2 * MIB);
    let put = |image: &mut Vec<u8>, at: usize, bytes: &[u8]| {
        image[at..at + bytes.len()].copy_from_slice(bytes);
    };
    let regions = 192 << 10;
    put(&mut image, regions, b"regi");
    put(&mut image, regions + 8, &1u32.to_le_bytes());
    let metadata = "06a27c8b90479a4bb8fe575f050f886e";
    let parameters = "3767a1ca36fa434db3b633f0aa44e76b";
    let disk_size = "2442a52f1bcd7648b2115dbed83bf4b8";
    put(&mut image, regions + 16, &guid(metadata));
    put(&mut image, regions + 32, &(MIB as u64).to_le_bytes());
    put(&mut image, regions + 40, &(MIB as u32).to_le_bytes());
    put(&mut image, MIB, b"metadata");
    put(&mut image, MIB + 10, &2u16.to_le_bytes());
    for (index, (id, at)) in [(parameters, 65536u32), (disk_size, 65544)].iter().enumerate() {
        put(&mut image, MIB + 32 * (index + 1), &guid(id));
        put(&mut image, MIB + 32 * (index + 1) + 16, &at.to_le_bytes());
    }
    put(&mut image, MIB + 65540, &(u32::from(parent) * 2).to_le_bytes());
    put(&mut image, MIB + 65544, &size.to_le_bytes());
    image
}

fn guid(hex: &str) -> Vec<u8> {
    (0..16).map(|i| u8::from_str_radix(&hex[i * 2..i * 2 + 2], 16).unwrap()).collect()
}

/// A disk with one partition.
pub fn mbr(flag: u8, kind: u8, start: u32, sectors: u32, len: usize) -> Vec<u8> {
    let mut image = vec![0; len];
    image[446] = flag;
    image[450] = kind;
    image[454..458].copy_from_slice(&start.to_le_bytes());
    image[458..462].copy_from_slice(&sectors.to_le_bytes());
    with(image, 510, b"\x55\xaa")
}

/// A disk with a GPT and its protective MBR.
pub fn gpt(len: usize) -> Vec<u8> {
    let image = with(mbr(0, 0xee, 1, u32::MAX, len), 512, b"EFI PART");
    with(image, 512 + 48, &((len as u64 / 512) - 34).to_le_bytes())
}
