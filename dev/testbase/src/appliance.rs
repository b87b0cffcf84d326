//! Appliances made by hand, with what no sound writer would put into them.

/// A tar file of these files, in ustar. Names have up to 100 bytes.
///
/// # Panics
/// For longer names.
pub fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, content) in files {
        bytes.extend(tar_header(name, content.len() as u64));
        bytes.extend(*content);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
    }
    bytes.resize(bytes.len() + 1024, 0);
    bytes
}

/// The ustar header of a file with so many bytes: below 8 GiB.
///
/// # Panics
/// For names of more than 100 bytes.
pub fn tar_header(name: &str, bytes: u64) -> [u8; 512] {
    let mut header = [0; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    for (at, text) in [
        (100, "0000644\0".to_owned()),
        (108, "0000000\0".to_owned()),
        (116, "0000000\0".to_owned()),
        (124, format!("{bytes:011o}\0")),
        (136, "00000000000\0".to_owned()),
        (148, "        ".to_owned()),
        (156, "0".to_owned()),
        (257, "ustar\x0000".to_owned()),
    ] {
        header[at..at + text.len()].copy_from_slice(text.as_bytes());
    }
    assert!(name.len() <= 100);
    let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

/// A descriptor of disks, each with attributes of its `File` and of its `Disk`, which lie in each other
/// in order.
pub fn ovf(disks: &[(&str, &str)]) -> String {
    let mut files = String::new();
    let mut list = String::new();
    for (number, (file, disk)) in (1..).zip(disks) {
        files += &format!("<File ovf:id=\"f{number}\" {file}/>");
        list += &format!("<Disk ovf:diskId=\"d{number}\" ovf:fileRef=\"f{number}\" {disk}/>");
    }
    format!(
        "<?xml version=\"1.0\"?>\n<Envelope xmlns=\"http://schemas.dmtf.org/ovf/envelope/1\" \
         xmlns:ovf=\"http://schemas.dmtf.org/ovf/envelope/1\"><References>{files}</References>\
         <DiskSection><Info/>{list}</DiskSection></Envelope>"
    )
}
