//! The OVF descriptor: files and disks of an appliance.

use std::collections::HashSet;

use vdkit_block::{Error, Result, require_within};

use crate::units::bytes_of_unit;
use crate::xml::{attribute, children, parse};

/// Maximum files, and disks, per appliance.
const ENTRIES_MAX: usize = 4096;
/// Maximum bytes of a file's name, which each disk in it copies: the longest path of Linux.
const HREF_BYTES_MAX: u64 = 4096;

/// A file of the appliance (`References/File`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileReference {
    /// The id by which disks refer to it.
    pub id: String,
    /// Its name in the archive.
    pub href: String,
    /// Its bytes, if given.
    pub size: Option<u64>,
    /// Its compression, in the descriptor's own word; `None` for `identity`.
    pub compression: Option<String>,
    /// Chunk size in bytes, if the file is split into `HREF.000000000` and so on.
    pub chunk_bytes: Option<u64>,
}

/// A disk of the appliance (`DiskSection/Disk`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualDisk {
    /// Its id in the descriptor.
    pub id: String,
    /// Id of its file; `None` for an empty disk.
    pub file: Option<String>,
    /// Bytes of the disk, if given in a known unit.
    pub capacity: Option<u64>,
    /// The format as an URI.
    pub format: Option<String>,
    /// The disk's parent.
    pub parent: Option<String>,
}

/// The parsed parts of a descriptor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// The name of the (first) virtual machine.
    pub system: Option<String>,
    /// The files, in their order.
    pub files: Vec<FileReference>,
    /// The disks, in their order.
    pub disks: Vec<VirtualDisk>,
}

impl Descriptor {
    /// Parses a descriptor. `file` and `offset` (its start in the file) are for messages.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for another document, for duplicate names, for chunks of no bytes and for
    /// disks in unlisted files; [`Error::Limit`].
    pub fn parse(file: &str, offset: u64, bytes: &[u8]) -> Result<Self> {
        let document = parse(file, offset, bytes)?;
        let root = document.root_element();
        let corrupt = |found: String, expected: &str| {
            Error::corrupt(file, offset, "OVF descriptor", found, expected)
        };
        if root.tag_name().name() != "Envelope" {
            let found = format!("the element '{}'", root.tag_name().name());
            return Err(corrupt(found, "the element 'Envelope'"));
        }
        let mut descriptor = Self { system: system_name(root), ..Self::default() };
        for reference in children(root, "References").flat_map(|list| children(list, "File")) {
            let wanted = |name: &str| {
                attribute(reference, name).map(str::to_owned).ok_or_else(|| {
                    corrupt(format!("a File without '{name}'"), "a File with id and href")
                })
            };
            let compression = attribute(reference, "compression");
            descriptor.files.push(FileReference {
                id: wanted("id")?,
                href: wanted("href")?.trim_start_matches("./").to_owned(),
                size: number(attribute(reference, "size")),
                compression: compression.filter(|how| *how != "identity").map(str::to_owned),
                chunk_bytes: number(attribute(reference, "chunkSize")),
            });
        }
        for disk in disks_of(root) {
            let id = attribute(disk, "diskId").ok_or_else(|| {
                corrupt("a Disk without 'diskId'".to_owned(), "a Disk with an id")
            })?;
            let unit = attribute(disk, "capacityAllocationUnits").map_or(Some(1), bytes_of_unit);
            let capacity = number(attribute(disk, "capacity"));
            let capacity = capacity.zip(unit).and_then(|(count, unit)| count.checked_mul(unit));
            descriptor.disks.push(VirtualDisk {
                id: id.to_owned(),
                file: attribute(disk, "fileRef").map(str::to_owned),
                capacity,
                format: attribute(disk, "format").map(str::to_owned),
                parent: attribute(disk, "parentRef").map(str::to_owned),
            });
        }
        descriptor.check(file, offset)?;
        Ok(descriptor)
    }

    fn check(&self, file: &str, offset: u64) -> Result<()> {
        for (what, found) in [
            ("number of files of the OVF descriptor", self.files.len()),
            ("number of disks of the OVF descriptor", self.disks.len()),
        ] {
            require_within(file, what, found as u64, ENTRIES_MAX as u64)?;
        }
        let corrupt = |found: String, expected: &str| {
            Err(Error::corrupt(file, offset, "OVF descriptor", found, expected))
        };
        if let Some(id) = twice(self.files.iter().map(|file| file.id.as_str())) {
            return corrupt(format!("two files with the id '{id}'"), "an id for each file");
        }
        if let Some(id) = twice(self.disks.iter().map(|disk| disk.id.as_str())) {
            return corrupt(format!("two disks with the id '{id}'"), "an id for each disk");
        }
        for reference in &self.files {
            let (what, len) =
                ("length of a file's name in the OVF descriptor", reference.href.len());
            require_within(file, what, len as u64, HREF_BYTES_MAX)?;
            if reference.chunk_bytes == Some(0) {
                let found = format!("a chunkSize of 0 of the file '{}'", reference.href);
                return corrupt(found, "chunks of one byte or more");
            }
        }
        let ids: HashSet<&str> = self.files.iter().map(|file| file.id.as_str()).collect();
        for disk in &self.disks {
            if let Some(id) = &disk.file
                && !ids.contains(id.as_str())
            {
                let found = format!("the disk '{}' in the file '{id}'", disk.id);
                return corrupt(found, "disks in files that are listed in References");
            }
        }
        Ok(())
    }

    /// The file with this id.
    pub fn file(&self, id: &str) -> Option<&FileReference> {
        self.files.iter().find(|file| file.id == id)
    }
}

/// The disks. OVF 0.9 stores its sections as `Section` with a type.
fn disks_of<'a, 'i: 'a>(
    root: roxmltree::Node<'a, 'i>,
) -> impl Iterator<Item = roxmltree::Node<'a, 'i>> {
    let sections = root.children().filter(|section| {
        let typed = attribute(*section, "type").is_some_and(|kind| kind.contains("DiskSection"));
        let name = section.tag_name().name();
        name == "DiskSection" || (name == "Section" && typed)
    });
    sections.flat_map(|section| children(section, "Disk"))
}

/// Name of the first virtual machine.
fn system_name(root: roxmltree::Node<'_, '_>) -> Option<String> {
    let system = root.descendants().find(|node| {
        node.is_element() && matches!(node.tag_name().name(), "VirtualSystem" | "Content")
    })?;
    let name = children(system, "Name").find_map(|name| name.text()).map(str::trim);
    let name = name.filter(|name| !name.is_empty()).or_else(|| attribute(system, "id"));
    name.map(str::to_owned)
}

fn number(text: Option<&str>) -> Option<u64> {
    // A capacity may also be a `${…}` placeholder, filled in at deployment.
    text.and_then(|text| text.trim().parse().ok())
}

/// The first duplicate name.
pub(crate) fn twice<'a>(names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut sorted: Vec<_> = names.collect();
    sorted.sort_unstable();
    sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Result<Descriptor> {
        let text = format!(
            "<?xml version=\"1.0\"?><Envelope xmlns=\"http://schemas.dmtf.org/ovf/envelope/1\" \
             xmlns:ovf=\"http://schemas.dmtf.org/ovf/envelope/1\">{body}</Envelope>"
        );
        Descriptor::parse("a.ova", 512, text.as_bytes())
    }

    #[test]
    fn files_disks_and_their_sizes() {
        let found = read(
            "<References><File ovf:id='f1' ovf:href='./a.vmdk' ovf:size='77'/>\
             <File ovf:href='b.vmdk.gz' ovf:id='f2' ovf:compression='gzip' ovf:chunkSize='100'/>\
             <File ovf:href='c.iso' ovf:id='f3' ovf:compression='identity'/></References>\
             <DiskSection><Info>x</Info><Disk ovf:diskId='d1' ovf:fileRef='f1' ovf:capacity='8' \
             ovf:capacityAllocationUnits='byte * 2^30' ovf:format='uri#streamOptimized'/>\
             <Disk ovf:diskId='d2' ovf:fileRef='f2' ovf:capacity='${size}' ovf:parentRef='d1'/>\
             <Disk ovf:diskId='d3' ovf:capacity='5' ovf:capacityAllocationUnits='parsec'/>\
             </DiskSection><VirtualSystem ovf:id='vm'><Info/><Name> My VM </Name></VirtualSystem>",
        )
        .unwrap();
        assert_eq!(found.system.as_deref(), Some("My VM"));
        let file = |index: usize| &found.files[index];
        assert_eq!((file(0).href.as_str(), file(0).size), ("a.vmdk", Some(77)));
        assert_eq!(
            (file(1).compression.as_deref(), file(1).chunk_bytes),
            (Some("gzip"), Some(100))
        );
        assert_eq!(file(2).compression, None);
        let [one, two, three] = &found.disks[..] else { panic!("{:?}", found.disks) };
        assert_eq!((one.capacity, one.file.as_deref()), (Some(8 << 30), Some("f1")));
        assert_eq!(one.format.as_deref(), Some("uri#streamOptimized"));
        assert_eq!((two.capacity, two.parent.as_deref()), (None, Some("d1")));
        assert_eq!((three.capacity, three.file.as_deref()), (None, None));
    }

    #[test]
    fn the_first_version_had_other_elements() {
        let found = read(
            "<References><File ovf:id='f' ovf:href='a.vmdk'/></References>\
             <Section xmlns:xsi='x' xsi:type='ovf:DiskSection_Type'><Disk ovf:diskId='d' \
             ovf:fileRef='f' ovf:capacity='100'/></Section>\
             <Content ovf:id='old'/>",
        )
        .unwrap();
        assert_eq!((found.disks.len(), found.system.as_deref()), (1, Some("old")));
    }

    #[test]
    fn what_does_not_fit_together_is_refused() {
        let fails = |body: &str, words: &str| {
            let error = read(body).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        let file = "<File ovf:id='f' ovf:href='a'/>";
        let disk = "<Disk ovf:diskId='d' ovf:fileRef='f'/>";
        fails(&format!("<References>{file}{file}</References>"), "two files with the id 'f'");
        fails("<References><File ovf:id='f'/></References>", "without 'href'");
        fails(&format!("<DiskSection>{disk}</DiskSection>"), "the disk 'd' in the file 'f'");
        fails("<DiskSection><Disk/></DiskSection>", "without 'diskId'");
        let both =
            format!("<References>{file}</References><DiskSection>{disk}{disk}</DiskSection>");
        fails(&both, "two disks with the id 'd'");
        let many: String = (0..5000).map(|i| format!("<File id='{i}' href='a'/>")).collect();
        fails(&format!("<References>{many}</References>"), "limit of 4096");
        let long = format!("<References><File id='f' href='{}'/></References>", "a".repeat(4097));
        fails(&long, "length of a file's name");
        let chunks = "<References><File id='f' href='a' chunkSize='0'/></References>";
        fails(chunks, "a chunkSize of 0 of the file 'a'");
        let error = Descriptor::parse("a", 0, b"<html/>").unwrap_err().to_string();
        assert!(error.contains("'html'") && error.contains("'Envelope'"), "{error}");
    }
}
