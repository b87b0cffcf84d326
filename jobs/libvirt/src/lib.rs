//! The libvirt `<disk>` element of an image.
//!
//! Source: libvirt, "Domain XML format", section "Hard drives, floppy disks, CDROMs". For `io` and
//! `cache`: QEMU's manual, `-blockdev` (`aio=native` needs direct I/O).

use std::path::{Path, PathBuf};

/// Source of a guest's disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskSource {
    /// A file.
    File(PathBuf),
    /// A block device.
    Device(PathBuf),
    /// An NBD server's Unix socket, and the export name.
    Nbd(PathBuf, String),
    /// A vhost-user server's Unix socket.
    VhostUser(PathBuf),
}

/// A backing image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskBacking {
    /// The file.
    pub path: PathBuf,
    /// A block device.
    pub device: bool,
    /// Its format, by vdkit's name.
    pub format: String,
}

/// Type of location, which determines the recommended cache mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CachePlace {
    /// A block device.
    Device,
    /// A file system in memory.
    Memory,
    /// A file system that refuses direct I/O.
    Buffered,
    /// btrfs with copy-on-write.
    Checksums,
    /// A file system with direct I/O.
    Direct,
}

/// The recommended cache mode for a guest disk at this location, and the reason. `doctor` reports
/// it; the lab uses it where it did not compare modes.
pub fn cache_for(place: CachePlace) -> (&'static str, &'static str) {
    match place {
        CachePlace::Device => ("none", "a device needs no page cache beside the guest's own"),
        CachePlace::Memory => ("writeback", "the file is in memory already"),
        CachePlace::Buffered => ("writeback", "the file system refuses direct I/O"),
        // Source: btrfs's documentation, "Checksumming", on direct I/O.
        CachePlace::Checksums => (
            "writeback",
            "btrfs has checksums, which a guest breaks that changes a buffer under direct I/O",
        ),
        CachePlace::Direct => ("none", "direct I/O works, and the guest caches itself"),
    }
}

/// A disk of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibvirtDisk {
    /// Its source.
    pub source: DiskSource,
    /// The format, by vdkit's name; `raw` for a served disk.
    pub format: String,
    /// Cache mode: none, writeback, writethrough, directsync, unsafe.
    pub cache: String,
    /// Fully allocated, so that writes to a file never wait for allocation.
    pub allocated: bool,
    /// Pass the guest's discards on.
    pub discard: bool,
    /// virtio, scsi, sata or ide.
    pub bus: String,
    /// Encrypted with LUKS.
    pub encrypted: bool,
    /// Bytes for the L2 cache, if QEMU's default is too small.
    pub map_cache_bytes: Option<u64>,
    /// The backing chain, nearest first.
    pub backing: Vec<DiskBacking>,
}

impl LibvirtDisk {
    /// A disk with the usual settings: virtio, direct I/O, discards enabled.
    pub fn new(source: DiskSource, format: &str) -> Self {
        Self {
            source,
            format: format.to_owned(),
            cache: cache_for(CachePlace::Direct).0.to_owned(),
            allocated: false,
            discard: true,
            bus: "virtio".to_owned(),
            encrypted: false,
            map_cache_bytes: None,
            backing: Vec::new(),
        }
    }

    /// QEMU's I/O method. `native` needs direct I/O, and blocks QEMU while a write waits for
    /// allocation.
    fn io(&self) -> &'static str {
        let direct = ["none", "directsync"].contains(&self.cache.as_str());
        let ready = self.allocated || matches!(self.source, DiskSource::Device(_));
        if direct && ready { "native" } else { "threads" }
    }

    /// The element, indented by two blanks per level, without a final line feed.
    pub fn xml(&self) -> String {
        let mut xml = Xml::default();
        let kind = match &self.source {
            DiskSource::File(_) => "file",
            DiskSource::Device(_) => "block",
            DiskSource::Nbd(..) => "network",
            DiskSource::VhostUser(_) => "vhostuser",
        };
        xml.open("disk", &[("type", kind), ("device", "disk")]);
        self.driver(&mut xml);
        self.source(&mut xml);
        if matches!(self.source, DiskSource::File(_) | DiskSource::Device(_)) {
            backing(&mut xml, &self.backing);
        }
        let device = match self.bus.as_str() {
            "virtio" => "vda",
            "ide" => "hda",
            _ => "sda",
        };
        xml.empty("target", &[("dev", device), ("bus", &self.bus)]);
        xml.close("disk");
        xml.text
    }

    fn driver(&self, xml: &mut Xml) {
        // The server of a vhost-user disk does the I/O.
        if matches!(self.source, DiskSource::VhostUser(_)) {
            return xml.empty("driver", &[("name", "qemu"), ("type", "raw")]);
        }
        let mut attributes =
            vec![("name", "qemu"), ("type", driver_type(&self.format)), ("cache", &self.cache)];
        if !matches!(self.source, DiskSource::Nbd(..)) {
            attributes.push(("io", self.io()));
        }
        if self.discard {
            attributes.push(("discard", "unmap"));
        }
        let Some(bytes) = self.map_cache_bytes else { return xml.empty("driver", &attributes) };
        xml.open("driver", &attributes);
        xml.open("metadata_cache", &[]);
        xml.line(&format!("<max_size unit='bytes'>{bytes}</max_size>"));
        xml.close("metadata_cache");
        xml.close("driver");
    }

    fn source(&self, xml: &mut Xml) {
        match &self.source {
            DiskSource::File(path) => self.local(xml, "file", path),
            DiskSource::Device(path) => self.local(xml, "dev", path),
            DiskSource::Nbd(socket, name) => {
                xml.open("source", &[("protocol", "nbd"), ("name", name)]);
                let socket = socket.to_string_lossy();
                xml.empty("host", &[("transport", "unix"), ("socket", &socket)]);
                xml.close("source");
            }
            DiskSource::VhostUser(socket) => {
                let socket = socket.to_string_lossy();
                xml.empty("source", &[("type", "unix"), ("path", &socket)]);
            }
        }
    }

    fn local(&self, xml: &mut Xml, key: &str, path: &Path) {
        let path = path.to_string_lossy();
        if !self.encrypted {
            return xml.empty("source", &[(key, &path)]);
        }
        xml.open("source", &[(key, &path)]);
        xml.open("encryption", &[("format", "luks")]);
        xml.empty("secret", &[("type", "passphrase"), ("uuid", "UUID")]);
        xml.close("encryption");
        xml.close("source");
    }
}

/// The backing chain, with an explicit end, so that libvirt does not probe further.
fn backing(xml: &mut Xml, images: &[DiskBacking]) {
    for image in images {
        let (kind, key) = if image.device { ("block", "dev") } else { ("file", "file") };
        xml.open("backingStore", &[("type", kind)]);
        xml.empty("format", &[("type", driver_type(&image.format))]);
        xml.empty("source", &[(key, &image.path.to_string_lossy())]);
    }
    if !images.is_empty() {
        xml.empty("backingStore", &[]);
    }
    for _ in images {
        xml.close("backingStore");
    }
}

/// Whether libvirt supports an image format. Source: libvirt's schema `domain.rng` (with
/// `storagecommon.rng`), `storageFormat`.
pub fn is_known(format: &str) -> bool {
    !["vhdx", "parallels"].contains(&format)
}

/// QEMU's name of a format.
fn driver_type(format: &str) -> &str {
    match format {
        "vhd" => "vpc",
        // A separate element declares the encryption.
        "luks" => "raw",
        same => same,
    }
}

#[derive(Default)]
struct Xml {
    text: String,
    depth: usize,
}

impl Xml {
    fn line(&mut self, line: &str) {
        if !self.text.is_empty() {
            self.text.push('\n');
        }
        self.text.push_str(&"  ".repeat(self.depth));
        self.text.push_str(line);
    }

    fn open(&mut self, name: &str, attributes: &[(&str, &str)]) {
        self.line(&format!("<{name}{}>", written(attributes)));
        self.depth += 1;
    }

    fn empty(&mut self, name: &str, attributes: &[(&str, &str)]) {
        self.line(&format!("<{name}{}/>", written(attributes)));
    }

    fn close(&mut self, name: &str) {
        self.depth = self.depth.saturating_sub(1);
        self.line(&format!("</{name}>"));
    }
}

fn written(attributes: &[(&str, &str)]) -> String {
    attributes.iter().map(|(key, value)| format!(" {key}='{}'", escaped(value))).collect()
}

/// Escapes a value for single quotation marks. XML 1.0 cannot represent most control characters;
/// they become the replacement character. Source: XML 1.0, 2.2 and 2.4.
fn escaped(value: &str) -> String {
    let mut plain = String::with_capacity(value.len());
    for c in value.chars() {
        match c {
            '&' => plain.push_str("&amp;"),
            '<' => plain.push_str("&lt;"),
            '>' => plain.push_str("&gt;"),
            '\'' => plain.push_str("&apos;"),
            '"' => plain.push_str("&quot;"),
            '\t' | '\n' | '\r' => plain.push_str(&format!("&#{};", u32::from(c))),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => plain.push('\u{fffd}'),
            c => plain.push(c),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, format: &str) -> LibvirtDisk {
        LibvirtDisk::new(DiskSource::File(name.into()), format)
    }

    #[test]
    fn a_file_with_a_chain() {
        let mut disk = file("/srv/a.qcow2", "qcow2");
        disk.map_cache_bytes = Some(1 << 30);
        for (path, device, format) in [("/srv/b.vhd", false, "vhd"), ("/dev/vg/c", true, "raw")] {
            disk.backing.push(DiskBacking { path: path.into(), device, format: format.into() });
        }
        let expected = "\
<disk type='file' device='disk'>
  <driver name='qemu' type='qcow2' cache='none' io='threads' discard='unmap'>
    <metadata_cache>
      <max_size unit='bytes'>1073741824</max_size>
    </metadata_cache>
  </driver>
  <source file='/srv/a.qcow2'/>
  <backingStore type='file'>
    <format type='vpc'/>
    <source file='/srv/b.vhd'/>
    <backingStore type='block'>
      <format type='raw'/>
      <source dev='/dev/vg/c'/>
      <backingStore/>
    </backingStore>
  </backingStore>
  <target dev='vda' bus='virtio'/>
</disk>";
        assert_eq!(disk.xml(), expected);
    }

    #[test]
    fn native_io_is_for_direct_io_to_space_that_is_there() {
        let io = |disk: &LibvirtDisk| disk.xml().contains("io='native'");
        let mut disk = file("a", "raw");
        assert!(!io(&disk));
        disk.allocated = true;
        assert!(io(&disk));
        disk.cache = "writeback".into();
        assert!(!io(&disk));
        assert!(io(&LibvirtDisk::new(DiskSource::Device("/dev/vg/a".into()), "raw")));
    }

    #[test]
    fn disks_of_servers() {
        let nbd = LibvirtDisk::new(DiskSource::Nbd("/run/s".into(), "x".into()), "raw").xml();
        assert!(nbd.contains(
            "<source protocol='nbd' name='x'>\n    <host transport='unix' socket='/run/s'/>"
        ));
        assert!(!nbd.contains("io="));
        let mut disk = LibvirtDisk::new(DiskSource::VhostUser("/run/v".into()), "qcow2");
        disk.bus = "scsi".into();
        let xml = disk.xml();
        assert!(xml.contains("<source type='unix' path='/run/v'/>") && xml.contains("dev='sda'"));
        assert!(xml.starts_with("<disk type='vhostuser' device='disk'>"));
    }

    #[test]
    fn names_cannot_break_out() {
        let mut disk = file("/srv/'/><evil a=\"&\u{1}\n", "luks");
        disk.encrypted = true;
        let xml = disk.xml();
        let name = "/srv/&apos;/&gt;&lt;evil a=&quot;&amp;\u{fffd}&#10;";
        assert!(xml.contains(&format!("<source file='{name}'>")), "{xml}");
        assert!(xml.contains("type='raw'") && xml.contains("<encryption format='luks'>"));
    }
}
