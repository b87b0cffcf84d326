//! Reading an OVA.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use vdkit_block::bytes::hex;
use vdkit_block::{CancelToken, Error, HostOffset, Result, Storage, require_within};
use vdkit_stream::{HashMethod, Hasher};

use crate::descriptor::{Descriptor, FileReference, VirtualDisk, twice};
use crate::manifest::Manifest;
use crate::tar::{MEMBERS_MAX, Member, first_name, is_header, members};
use crate::window::Window;

/// Bytes hashed between two checks of the cancel token.
const STEP: usize = 1 << 20;
/// Maximum characters of a file name derived from an untrusted one.
const STEM_CHARS_MAX: usize = 100;

/// Limits on an appliance.
#[derive(Clone, Copy, Debug)]
pub struct PackageLimits {
    /// Bytes of the descriptor.
    pub descriptor_bytes_max: u64,
    /// Bytes of the manifest.
    pub manifest_bytes_max: u64,
}

impl Default for PackageLimits {
    /// 4 MiB each: descriptors contain licences, and a disk may be in thousands of chunks.
    fn default() -> Self {
        Self { descriptor_bytes_max: 4 << 20, manifest_bytes_max: 4 << 20 }
    }
}

/// A disk of an appliance.
#[derive(Clone, Debug)]
pub struct PackagedDisk {
    /// Its entry in the descriptor.
    pub disk: VirtualDisk,
    /// Its file; `None` for an empty disk.
    pub file: Option<FileReference>,
    /// Its archive members; several for a file in chunks. Disks in one file share them.
    pub members: Arc<[Member]>,
    /// Its file's bytes; `None` for an empty disk.
    window: Option<Arc<Window>>,
}

impl PackagedDisk {
    /// Bytes of its file in the archive.
    pub fn file_bytes(&self) -> u64 {
        self.window.as_ref().map_or(0, |window| window.bytes())
    }

    /// Whether its file is compressed as a whole, by gzip.
    pub fn gzipped(&self) -> bool {
        self.file.as_ref().is_some_and(|file| file.compression.is_some())
    }

    /// A safe file name without extension, derived from its file's name or its id; `None` if
    /// neither is usable. It contains no separators, no leading dot or hyphen, and no invisible
    /// characters.
    pub fn safe_stem(&self) -> Option<String> {
        let href = self.file.as_ref().map(|file| file.href.as_str());
        let href = href.map(|href| href.strip_suffix(".gz").unwrap_or(href));
        let stem = href.map(|href| match href.rsplit_once('.') {
            Some((stem, ending)) if !ending.contains('/') => stem,
            _ => href,
        });
        [stem, Some(&*self.disk.id)]
            .into_iter()
            .flatten()
            .find(|name| harmless(name))
            .map(str::to_owned)
    }
}

fn harmless(name: &str) -> bool {
    let fine = |c: char| c.is_alphanumeric() || "-_.+()[]@,~ ".contains(c);
    name.starts_with(|c: char| c.is_alphanumeric() || c == '_')
        && !name.ends_with([' ', '.'])
        && name.chars().count() <= STEM_CHARS_MAX
        && name.chars().all(fine)
}

/// An OVA: its descriptor, disks and manifest.
#[derive(Debug)]
pub struct Package {
    storage: Arc<dyn Storage>,
    descriptor_name: String,
    descriptor: Descriptor,
    disks: Vec<PackagedDisk>,
    manifest: Option<(String, Manifest)>,
    certificate: Option<String>,
}

impl Package {
    /// Whether a file's first bytes are those of an OVA: a tar file whose first file is a
    /// descriptor.
    pub fn is_one(head: &[u8]) -> bool {
        first_name(head).is_some_and(|name| ends_with(&name, ".ovf"))
    }

    /// Whether a file is, or claims to be, an OVA: its first file is a descriptor, or it is a tar
    /// file whose name ends in `.ova`.
    pub fn looks_like(name: &str, head: &[u8]) -> bool {
        Self::is_one(head) || (ends_with(name, ".ova") && Self::is_tar(head))
    }

    /// Whether a file's first 512 bytes are a tar header.
    pub fn is_header(sector: &[u8]) -> bool {
        is_header(sector)
    }

    /// Whether a file's first bytes are those of a tar file.
    pub fn is_tar(head: &[u8]) -> bool {
        first_name(head).is_some()
    }

    /// Reads the list of members, the manifest and the descriptor, and checks the descriptor's
    /// hash.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for damage, for a missing or duplicate file, and for a descriptor that
    /// does not match the manifest; [`Error::Unsupported`] for compression other than gzip and for
    /// disks with parents; [`Error::Limit`]; errors of reading.
    pub fn open(storage: Arc<dyn Storage>, limits: &PackageLimits) -> Result<Self> {
        let name = storage.name().to_owned();
        let members = members(&*storage)?;
        if let Some(name_twice) = twice(members.iter().map(|member| member.name.as_str())) {
            let found = format!("two files called '{name_twice}'");
            return Err(Error::corrupt(&name, 0, "tar file", found, "a name for each file"));
        }
        let by_name: HashMap<&str, &Member> =
            members.iter().map(|member| (member.name.as_str(), member)).collect();
        let descriptor_member = descriptor_of(&name, &members)?;
        let stem = &descriptor_member.name[..descriptor_member.name.len() - ".ovf".len()];
        let beside = |ending: &str| beside(&members, stem, ending);
        let manifest = match beside(".mf") {
            Some(member) => {
                let what = "size of the manifest";
                let bytes = read(&*storage, member, limits.manifest_bytes_max, what)?;
                Some((member.name.clone(), Manifest::parse(&name, member.offset, &bytes)?))
            }
            None => None,
        };
        let certificate = beside(".cert").map(|member| member.name.clone());
        let what = "size of the OVF descriptor";
        let bytes = read(&*storage, descriptor_member, limits.descriptor_bytes_max, what)?;
        let cancel = CancelToken::default();
        if let Some((_, manifest)) = &manifest {
            check_names(&name, manifest, &by_name)?;
            verify(&*storage, manifest, descriptor_member, &cancel, &mut |_| {})?;
        }
        let descriptor = Descriptor::parse(&name, descriptor_member.offset, &bytes)?;
        let descriptor_name = descriptor_member.name.clone();
        let disks = packaged(&storage, &descriptor, &by_name)?;
        Ok(Self { storage, descriptor_name, descriptor, disks, manifest, certificate })
    }

    /// The file's name, for messages.
    pub fn name(&self) -> &str {
        self.storage.name()
    }

    /// The descriptor's name in the archive.
    pub fn descriptor_name(&self) -> &str {
        &self.descriptor_name
    }

    /// The descriptor.
    pub fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// The disks, in the descriptor's order.
    pub fn disks(&self) -> &[PackagedDisk] {
        &self.disks
    }

    /// The manifest and its name; `None` if the archive has none, so that verification is
    /// impossible.
    pub fn manifest(&self) -> Option<(&str, &Manifest)> {
        self.manifest.as_ref().map(|(name, manifest)| (name.as_str(), manifest))
    }

    /// The name of the certificate, which is not verified.
    pub fn certificate(&self) -> Option<&str> {
        self.certificate.as_deref()
    }

    /// Finds a disk by its number (from 1), its id, or its file's name.
    ///
    /// # Errors
    /// [`Error::Invalid`] if none or several match, listing the disks.
    pub fn find(&self, which: &str) -> Result<usize> {
        let number = which.parse::<usize>().ok().and_then(|number| number.checked_sub(1));
        if let Some(index) = number.filter(|&index| index < self.disks.len()) {
            return Ok(index);
        }
        let named = |disk: &PackagedDisk| {
            disk.disk.id == which || disk.file.as_ref().is_some_and(|file| file.href == which)
        };
        let mut found = (0..self.disks.len()).filter(|&index| named(&self.disks[index]));
        match (found.next(), found.next()) {
            (Some(index), None) => Ok(index),
            _ => Err(Error::invalid_for(
                &self.name(),
                format!("'{which}' is not one of its disks, which are {}", self.listed()),
            )),
        }
    }

    /// The disks with their numbers, for messages.
    pub fn listed(&self) -> String {
        let texts = self.disks.iter().enumerate().map(|(index, disk)| {
            let file = disk.file.as_ref().map_or("empty", |file| &file.href);
            format!("{} '{}' ({file})", index + 1, disk.disk.id)
        });
        let texts: Vec<_> = texts.collect();
        if texts.is_empty() { "none".to_owned() } else { texts.join(", ") }
    }

    /// The stored bytes of a disk's file; `None` for an empty disk.
    pub fn storage_of(&self, index: usize) -> Option<Arc<dyn Storage>> {
        let window = self.disks.get(index)?.window.clone()?;
        Some(window)
    }

    /// Verifies a disk's file against the manifest. Calls `read` with the bytes read.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if it does not match, or is not in the manifest; [`Error::Interrupted`];
    /// errors of reading.
    pub fn verify(
        &self,
        index: usize,
        cancel: &CancelToken,
        read: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let (Some((_, manifest)), Some(disk)) = (&self.manifest, self.disks.get(index)) else {
            return Ok(());
        };
        let mut members = disk.members.iter();
        members.try_for_each(|member| verify(&*self.storage, manifest, member, cancel, read))
    }
}

/// Whether a name has this extension, case-insensitively.
fn ends_with(name: &str, ending: &str) -> bool {
    let start = name.len().checked_sub(ending.len());
    start.and_then(|start| name.get(start..)).is_some_and(|end| end.eq_ignore_ascii_case(ending))
}

fn descriptor_of<'a>(file: &str, members: &'a [Member]) -> Result<&'a Member> {
    let mut found = members.iter().filter(|member| ends_with(&member.name, ".ovf"));
    match (found.next(), found.next()) {
        (Some(member), None) => Ok(member),
        (None, _) => {
            let found = "none";
            Err(Error::corrupt(file, 0, "OVA", found, "a descriptor, a file that ends in .ovf"))
        }
        (Some(_), Some(second)) => {
            let found = format!("a second descriptor '{}'", second.name);
            Err(Error::corrupt(file, second.offset, "OVA", found, "one descriptor"))
        }
    }
}

/// The file with the descriptor's name and this extension, or the only one with this extension.
fn beside<'a>(members: &'a [Member], stem: &str, ending: &str) -> Option<&'a Member> {
    let mut all = members.iter().filter(|member| ends_with(&member.name, ending));
    let same = |member: &&Member| {
        member.name.len() == stem.len() + ending.len() && member.name.starts_with(stem)
    };
    match all.clone().find(same) {
        Some(member) => Some(member),
        None => all.next().filter(|_| all.next().is_none()),
    }
}

/// Reads a small file completely.
fn read(storage: &dyn Storage, member: &Member, limit: u64, what: &'static str) -> Result<Vec<u8>> {
    require_within(storage.name(), what, member.len, limit)?;
    let mut bytes = vec![0; member.len as usize];
    storage.read_at(&mut bytes, HostOffset(member.offset))?;
    Ok(bytes)
}

/// A manifest that names missing files belongs to another or incomplete archive.
fn check_names(file: &str, manifest: &Manifest, members: &HashMap<&str, &Member>) -> Result<()> {
    let missing = manifest.entries().iter().find(|entry| !members.contains_key(&*entry.name));
    missing.map_or(Ok(()), |entry| {
        let found = format!("no file '{}'", entry.name);
        Err(Error::corrupt(file, 0, "OVA", found, "every file that the manifest names"))
    })
}

/// The disks with their archive members. A file is resolved once, however many disks are in it.
fn packaged(
    storage: &Arc<dyn Storage>,
    descriptor: &Descriptor,
    members: &HashMap<&str, &Member>,
) -> Result<Vec<PackagedDisk>> {
    let name = storage.name();
    let child = descriptor.disks.iter().find(|disk| disk.file.is_some() && disk.parent.is_some());
    if let Some(VirtualDisk { id, parent: Some(parent), .. }) = child {
        let what = format!("its disk '{id}' stands on its disk '{parent}'");
        let hint = "unpack it with tar and convert the overlay with its parent";
        return Err(Error::unsupported(name, what, hint));
    }
    let ids = descriptor.disks.iter().filter_map(|disk| disk.file.as_deref());
    let used: HashSet<&str> = ids.collect();
    let mut files = HashMap::new();
    let mut pieces = 0;
    for reference in descriptor.files.iter().filter(|file| used.contains(file.id.as_str())) {
        let found = members_of(name, reference, members)?;
        // Only files that are listed several times have more than the archive.
        pieces += found.len() as u64;
        require_within(name, "number of pieces of an OVA's disks", pieces, MEMBERS_MAX)?;
        let ranges = found.iter().map(|member| member.offset..member.offset + member.len).collect();
        let title = format!("{name}:{}", reference.href);
        let window = Arc::new(Window::new(storage.clone(), title, ranges));
        files.insert(reference.id.as_str(), (reference, Arc::<[Member]>::from(found), window));
    }
    let disk = |disk: &VirtualDisk| {
        let found = disk.file.as_deref().and_then(|id| files.get(id)).cloned();
        let (file, members, window) = match found {
            Some((file, members, window)) => (Some(file.clone()), members, Some(window)),
            None => (None, Arc::default(), None),
        };
        PackagedDisk { disk: disk.clone(), file, members, window }
    };
    Ok(descriptor.disks.iter().map(disk).collect())
}

/// The archive members of a file.
fn members_of(
    name: &str,
    reference: &FileReference,
    members: &HashMap<&str, &Member>,
) -> Result<Vec<Member>> {
    if let Some(method) = reference.compression.as_deref().filter(|method| *method != "gzip") {
        let what = format!("'{}' is compressed by '{method}'", reference.href);
        let hint = "unpack it with tar and decompress the file; gzip is known";
        return Err(Error::unsupported(name, what, hint));
    }
    let corrupt =
        |found: String, expected: &str| Err(Error::corrupt(name, 0, "OVA", found, expected));
    let find = |name: &str| members.get(name).map(|&member| member.clone());
    let members = match reference.chunk_bytes {
        None => find(&reference.href).into_iter().collect::<Vec<_>>(),
        Some(_) => {
            let numbers = (0..).map(|number: u32| format!("{}.{number:09}", reference.href));
            numbers.map_while(|name| find(&name)).collect()
        }
    };
    if members.is_empty() {
        let found = format!("no file '{}'", reference.href);
        return corrupt(found, "every file that the descriptor's disks are in");
    }
    if let Some(bytes) = reference.chunk_bytes {
        let (last, whole) = members.split_last().unwrap_or((&members[0], &[]));
        if let Some(odd) = whole.iter().find(|member| member.len != bytes) {
            let found = format!("{} bytes of '{}'", odd.len, odd.name);
            return corrupt(found, &format!("{bytes} bytes of each piece but the last"));
        }
        if last.len > bytes {
            let found = format!("{} bytes of '{}'", last.len, last.name);
            return corrupt(found, &format!("{bytes} bytes at most"));
        }
    }
    let found: u64 = members.iter().map(|member| member.len).sum();
    if reference.size.is_some_and(|size| size != found) {
        let expected = format!("{} as the descriptor says", reference.size.unwrap_or(0));
        return corrupt(format!("{found} bytes of '{}'", reference.href), &expected);
    }
    Ok(members)
}

/// Hashes a member and compares it with the manifest.
fn verify(
    storage: &dyn Storage,
    manifest: &Manifest,
    member: &Member,
    cancel: &CancelToken,
    read: &mut dyn FnMut(u64),
) -> Result<()> {
    let name = format!("{}:{}", storage.name(), member.name);
    let entries: Vec<_> = manifest.of(&member.name).collect();
    if entries.is_empty() {
        let expected = "a hash of every file";
        return Err(Error::corrupt(&name, member.offset, "manifest", "none for it", expected));
    }
    // Each method once, however many lines the manifest has for the file.
    let mut hashers: Vec<(HashMethod, Hasher)> = Vec::new();
    for entry in &entries {
        if hashers.iter().all(|(method, _)| *method != entry.method) {
            hashers.push((entry.method, Hasher::new(entry.method)));
        }
    }
    // An empty member asks too: there may be many.
    cancel.check()?;
    let mut buf = vec![0; STEP.min(member.len as usize)];
    let mut done = 0;
    while done < member.len {
        cancel.check()?;
        let want = (member.len - done).min(STEP as u64) as usize;
        storage.read_at(&mut buf[..want], HostOffset(member.offset + done))?;
        hashers.iter_mut().for_each(|(_, hasher)| hasher.update(&buf[..want]));
        done += want as u64;
        read(want as u64);
    }
    for (method, hasher) in hashers {
        let found = hasher.finish();
        let mut same = entries.iter().filter(|entry| entry.method == method);
        if let Some(entry) = same.find(|entry| entry.digest != found) {
            let text = |digest: &[u8]| format!("{method}:{}", hex(digest));
            let expected = format!("{} as the manifest says", text(&entry.digest));
            return Err(Error::corrupt(&name, member.offset, "file", text(&found), expected));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
