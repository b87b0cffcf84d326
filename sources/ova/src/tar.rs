//! The members of a tar file, and headers of new ones.
//!
//! Supported are the headers of ustar, of pax (`path` and `size` of extended headers) and of GNU
//! tar (long names, sizes in base 256). Sparse members and multi-volume archives are refused.
//!
//! The crate `tar` does not fit: it reads long names and extended headers into memory without a
//! bound, and its errors have no offsets. Its headers alone cut sizes in base 256 to 64 bits
//! silently, and refuse the signed checksums of old writers.

use vdkit_block::{Error, HostOffset, Result, Storage, require_within};

/// Bytes of a header; members are padded to this.
pub(crate) const BLOCK: u64 = 512;
/// Maximum members of an archive: a disk of 2 TiB in chunks of 64 MiB has half as many.
pub(crate) const MEMBERS_MAX: u64 = 1 << 16;
/// Maximum bytes of a long name or extended header.
const EXTENSION_BYTES_MAX: u64 = 1 << 20;
/// No path may be longer on Linux, and no descriptor names one.
const NAME_BYTES_MAX: u64 = 4096;
/// The largest size in 11 octal digits.
const OCTAL_MAX: u64 = (1 << 33) - 1;

/// Offsets of header fields (IEEE 1003.1, "ustar Interchange Format").
mod field {
    use std::ops::Range;

    pub(super) const NAME: Range<usize> = 0..100;
    pub(super) const MODE: Range<usize> = 100..108;
    pub(super) const OWNER: Range<usize> = 108..116;
    pub(super) const GROUP: Range<usize> = 116..124;
    pub(super) const SIZE: Range<usize> = 124..136;
    pub(super) const MODIFIED: Range<usize> = 136..148;
    pub(super) const CHECKSUM: Range<usize> = 148..156;
    pub(super) const KIND: usize = 156;
    pub(super) const MAGIC: Range<usize> = 257..265;
    pub(super) const PREFIX: Range<usize> = 345..500;
}

/// A regular file within a tar file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name, without a leading `./`. Untrusted: never use it as a path.
    pub name: String,
    /// Offset of its first byte in the tar file.
    pub offset: u64,
    /// Its bytes.
    pub len: u64,
}

/// The regular files of a tar file, in order.
///
/// # Errors
/// [`Error::Corrupt`] for invalid headers and for members that extend past the end of the file;
/// [`Error::Unsupported`] for sparse members and volumes; [`Error::Limit`]; errors of reading.
pub fn members(storage: &dyn Storage) -> Result<Vec<Member>> {
    let len = storage.len()?;
    let read = |buf: &mut [u8], at: u64| storage.read_up_to(buf, HostOffset(at));
    let mut walk = Walk { name: storage.name(), read, len, at: 0, headers: 0 };
    let mut members = Vec::new();
    while let Some(member) = walk.step()? {
        members.push(member);
    }
    Ok(members)
}

/// The name of the first regular file, from the first bytes of a file; `None` if it is no tar file.
pub(crate) fn first_name(head: &[u8]) -> Option<String> {
    let read = |buf: &mut [u8], at: u64| {
        let rest = usize::try_from(at).ok().and_then(|at| head.get(at..)).unwrap_or_default();
        let got = rest.len().min(buf.len());
        buf[..got].copy_from_slice(&rest[..got]);
        Ok(got)
    };
    // The file's length is irrelevant here.
    let mut walk = Walk { name: "", read, len: u64::MAX, at: 0, headers: 0 };
    walk.step().ok().flatten().map(|member| member.name)
}

/// Whether these bytes are a header with a valid checksum.
pub(crate) fn is_header(bytes: &[u8]) -> bool {
    bytes.len() >= BLOCK as usize && bytes[0] != 0 && has_checksum(&bytes[..BLOCK as usize])
}

/// Whether a header has a valid checksum, or the sum of signed bytes that some old writers stored.
fn has_checksum(header: &[u8]) -> bool {
    let found = number(&header[field::CHECKSUM]);
    let (plain, signed) = checksums(header);
    found == Some(plain) || u64::try_from(signed).is_ok_and(|signed| found == Some(signed))
}

/// A walk from header to header.
struct Walk<'a, R> {
    /// The file's name, for messages.
    name: &'a str,
    read: R,
    len: u64,
    at: u64,
    headers: u64,
}

/// Extended header values for the next member.
#[derive(Default)]
struct Extended {
    name: Option<String>,
    size: Option<u64>,
}

impl<R: FnMut(&mut [u8], u64) -> Result<usize>> Walk<'_, R> {
    fn corrupt(&self, at: u64, found: impl Into<String>, expected: &str) -> Error {
        Error::corrupt(self.name, at, "tar header", found, expected)
    }

    fn unsupported(&self, what: &str) -> Error {
        let hint = "unpack it with tar, and pack it again with 'tar --format=ustar'";
        Error::unsupported(self.name, format!("is a tar file with {what}"), hint)
    }

    /// The next regular file; `None` at the end.
    fn step(&mut self) -> Result<Option<Member>> {
        let mut extended = Extended::default();
        loop {
            let at = self.at;
            let Some(header) = self.header()? else { return Ok(None) };
            let kind = header[field::KIND];
            let size = match kind {
                // Links, devices, folders and FIFOs have no bytes, whatever the field contains.
                b'1'..=b'6' => 0,
                _ => extended.size.filter(|_| is_file(kind)).map_or_else(
                    || number(&header[field::SIZE]).ok_or_else(|| self.bad_size(at)),
                    Ok,
                )?,
            };
            let offset = at + BLOCK;
            let end = offset.checked_add(size).filter(|&end| end <= self.len).ok_or_else(|| {
                let found = format!("a member of {size} bytes in a file of {} bytes", self.len);
                self.corrupt(at, found, "members that end before the file does")
            })?;
            self.at = end.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX);
            match kind {
                b'L' => extended.name = Some(text(&self.extension(at, offset, size)?)),
                b'x' | b'X' => self.records(at, offset, size, &mut extended)?,
                b'S' => return Err(self.unsupported("sparse members")),
                b'M' => return Err(self.unsupported("members that begin in another volume")),
                _ if is_file(kind) => {
                    let name = extended.name.take().unwrap_or_else(|| name_of(&header));
                    let len = name.len() as u64;
                    require_within(
                        self.name,
                        "length of a name in a tar file",
                        len,
                        NAME_BYTES_MAX,
                    )?;
                    let name = name.trim_start_matches("./").to_owned();
                    // How folders were written before they had a type.
                    if !(kind == 0 && name.ends_with('/')) {
                        return Ok(Some(Member { name, offset, len: size }));
                    }
                    extended = Extended::default();
                }
                // A link's long name belongs to the next header, as names do; other values end
                // here.
                b'K' => {}
                _ => extended = Extended::default(),
            }
        }
    }

    /// The validated header at the current position; `None` at the end of the archive.
    fn header(&mut self) -> Result<Option<[u8; BLOCK as usize]>> {
        if self.at >= self.len {
            // Some writers omit the final blocks of zeroes. A missing member is detected by its
            // user.
            return if self.headers == 0 { Err(self.no_tar()) } else { Ok(None) };
        }
        self.headers += 1;
        let what = "number of members of a tar file";
        require_within(self.name, what, self.headers, MEMBERS_MAX)?;
        let mut header = [0; BLOCK as usize];
        let at = self.at;
        let got = (self.read)(&mut header, at)?;
        if got < header.len() {
            let found = format!("the end of the file after {got} bytes");
            return Err(self.corrupt(at, found, "a header of 512 bytes"));
        }
        if header.iter().all(|&byte| byte == 0) {
            return if self.headers == 1 { Err(self.no_tar()) } else { Ok(None) };
        }
        if !has_checksum(&header) {
            let (found, (plain, _)) = (number(&header[field::CHECKSUM]), checksums(&header));
            let found = found.map_or("no number".to_owned(), |sum| format!("{sum:o}"));
            let found = format!("the checksum {found}");
            return Err(self.corrupt(at, found, &format!("{plain:o}")));
        }
        Ok(Some(header))
    }

    fn no_tar(&self) -> Error {
        self.corrupt(0, "no header", "a tar file")
    }

    fn bad_size(&self, at: u64) -> Error {
        self.corrupt(at, "a size that is no number", "octal digits, or 63 bits in base 256")
    }

    fn extension(&mut self, at: u64, offset: u64, size: u64) -> Result<Vec<u8>> {
        require_within(self.name, "size of an extended tar header", size, EXTENSION_BYTES_MAX)?;
        let mut bytes = vec![0; size as usize];
        let got = (self.read)(&mut bytes, offset)?;
        if got < bytes.len() {
            return Err(self.corrupt(at, "an extended header that is cut short", "all its bytes"));
        }
        Ok(bytes)
    }

    /// Parses the records of a pax header: `LENGTH KEY=VALUE\n` each.
    fn records(&mut self, at: u64, offset: u64, size: u64, to: &mut Extended) -> Result<()> {
        let bytes = self.extension(at, offset, size)?;
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let Some((key, value, behind)) = record(rest) else {
                let expected = "records of pax: LENGTH KEY=VALUE and a newline";
                return Err(self.corrupt(offset, "another text", expected));
            };
            match key {
                b"path" => to.name = Some(text(value)),
                b"size" => {
                    let size = std::str::from_utf8(value).ok().and_then(|v| v.parse().ok());
                    to.size = Some(size.ok_or_else(|| self.bad_size(offset))?);
                }
                _ if key.starts_with(b"GNU.sparse.") => {
                    return Err(self.unsupported("sparse members"));
                }
                _ => {}
            }
            rest = behind;
        }
        Ok(())
    }
}

/// Whether a header's type is a regular file, in POSIX or older formats.
fn is_file(kind: u8) -> bool {
    matches!(kind, b'0' | 0 | b'7')
}

/// The first record's key and value, and the rest.
fn record(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = bytes.iter().take(20).position(|&byte| byte == b' ')?;
    let len: usize = std::str::from_utf8(&bytes[..space]).ok()?.parse().ok()?;
    let record = bytes.get(space + 1..len)?;
    let record = record.strip_suffix(b"\n")?;
    let equals = record.iter().position(|&byte| byte == b'=')?;
    Some((&record[..equals], &record[equals + 1..], &bytes[len..]))
}

/// The text before the first NUL. Invalid UTF-8 is replaced, and matches no name of a descriptor.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

fn name_of(header: &[u8]) -> String {
    let name = text(&header[field::NAME]);
    // GNU's headers have other fields in place of the POSIX prefix.
    let prefix = match &header[field::MAGIC] {
        b"ustar\x0000" => text(&header[field::PREFIX]),
        _ => String::new(),
    };
    if prefix.is_empty() { name } else { format!("{prefix}/{name}") }
}

/// A number in octal digits, or (with the first bit set) in base 256.
fn number(bytes: &[u8]) -> Option<u64> {
    let (&first, rest) = bytes.split_first()?;
    if first & 0x80 != 0 {
        // Bit 6 is the sign.
        if first & 0x40 != 0 {
            return None;
        }
        let start = u64::from(first & 0x3f);
        return rest
            .iter()
            .try_fold(start, |sum, &byte| sum.checked_mul(256)?.checked_add(u64::from(byte)))
            .filter(|&sum| i64::try_from(sum).is_ok());
    }
    let text = std::str::from_utf8(bytes).ok()?;
    let digits = text.trim_matches([' ', '\0']);
    if digits.is_empty() {
        return Some(0);
    }
    if !digits.bytes().all(|digit| matches!(digit, b'0'..=b'7')) {
        return None;
    }
    u64::from_str_radix(digits, 8).ok()
}

/// The sum of a header's bytes, with blanks for the checksum: unsigned as specified, and signed as
/// by some old writers.
fn checksums(header: &[u8]) -> (u64, i64) {
    let blanked = |(at, &byte): (usize, &u8)| {
        if field::CHECKSUM.contains(&at) { b' ' } else { byte }
    };
    let bytes = header.iter().enumerate().map(blanked);
    bytes.fold((0, 0), |(plain, signed), byte| {
        (plain + u64::from(byte), signed + i64::from(byte as i8))
    })
}

/// The ustar header of a new file. A size beyond 11 octal digits is written in base 256, as by GNU
/// tar; VirtualBox and bsdtar read it too. `modified` is in seconds since 1970.
pub(crate) fn header(name: &str, size: u64, modified: u64) -> [u8; BLOCK as usize] {
    debug_assert!(name.len() <= field::NAME.len());
    let mut header = [0; BLOCK as usize];
    let name = &name.as_bytes()[..name.len().min(field::NAME.len())];
    header[..name.len()].copy_from_slice(name);
    octal(&mut header[field::MODE], 0o644);
    octal(&mut header[field::OWNER], 0);
    octal(&mut header[field::GROUP], 0);
    if size <= OCTAL_MAX {
        octal(&mut header[field::SIZE], size);
    } else {
        let bytes = &mut header[field::SIZE];
        bytes[0] = 0x80;
        let low = bytes.len() - 8;
        bytes[low..].copy_from_slice(&size.to_be_bytes());
    }
    octal(&mut header[field::MODIFIED], modified.min(OCTAL_MAX));
    header[field::KIND] = b'0';
    header[field::MAGIC].copy_from_slice(b"ustar\x0000");
    let (sum, _) = checksums(&header);
    let digits = format!("{sum:06o}\0 ");
    header[field::CHECKSUM].copy_from_slice(digits.as_bytes());
    header
}

/// Octal digits and a NUL.
fn octal(field: &mut [u8], value: u64) {
    let width = field.len() - 1;
    let digits = format!("{value:0width$o}");
    field[..width].copy_from_slice(&digits.as_bytes()[digits.len() - width..]);
}

#[cfg(test)]
mod tests {
    use vdkit_storage::MemoryStorage;

    use super::*;

    /// A tar file of these headers and contents.
    fn archive(parts: &[([u8; 512], &[u8])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (header, content) in parts {
            bytes.extend(header);
            bytes.extend(*content);
            bytes.resize(bytes.len().next_multiple_of(512), 0);
        }
        bytes.resize(bytes.len() + 1024, 0);
        bytes
    }

    fn of_kind(name: &str, size: u64, kind: u8) -> [u8; 512] {
        changed(header(name, size, 0), |header| header[field::KIND] = kind)
    }

    /// Changes a header and updates its checksum.
    fn changed(mut header: [u8; 512], change: impl FnOnce(&mut [u8; 512])) -> [u8; 512] {
        change(&mut header);
        let digits = format!("{:06o}\0 ", checksums(&header).0);
        header[field::CHECKSUM].copy_from_slice(digits.as_bytes());
        header
    }

    fn read(bytes: &[u8]) -> Result<Vec<Member>> {
        members(&MemoryStorage::from_bytes("a.ova", bytes))
    }

    fn member(name: &str, offset: u64, len: u64) -> Member {
        Member { name: name.to_owned(), offset, len }
    }

    #[test]
    fn files_are_found_in_their_order() {
        let bytes = archive(&[
            (header("a.ovf", 3, 0), b"abc"),
            (of_kind("folder/", 0, b'5'), b""),
            (of_kind("link", 700, b'2'), b""),
            (header("./b", 513, 0), &[1; 513]),
            (header("empty", 0, 0), b""),
        ]);
        let found = read(&bytes).unwrap();
        let wanted = [member("a.ovf", 512, 3), member("b", 2560, 513), member("empty", 4096, 0)];
        assert_eq!(found, wanted);
        // The blocks of zeroes may be missing, and anything after them is ignored.
        assert_eq!(read(&bytes[..4096]).unwrap(), wanted);
        let behind = [&bytes[..], &header("ghost", 0, 0)].concat();
        assert_eq!(read(&behind).unwrap(), wanted);
    }

    #[test]
    fn long_names_and_large_sizes_are_taken_from_extensions() {
        let long = "d/".repeat(80) + "disk.vmdk";
        let pax = b"27 path=some where/else.vmdk\n";
        assert!(record(pax).is_none(), "its length is wrong");
        let pax = b"29 path=some where/else.vmdk\n12 size=600\n";
        assert!(record(pax).is_some());
        let bytes = archive(&[
            (of_kind("././@LongLink", long.len() as u64 + 1, b'L'), format!("{long}\0").as_bytes()),
            (header("short", 1, 0), b"x"),
            (of_kind("PaxHeaders/x", pax.len() as u64, b'x'), pax),
            (header("cut", 0, 0), &[2; 600]),
            (header("own", 2, 0), b"yz"),
        ]);
        let found = read(&bytes).unwrap();
        assert_eq!((found[0].name.as_str(), found[0].len), (long.as_str(), 1));
        assert_eq!((found[1].name.as_str(), found[1].len), ("some where/else.vmdk", 600));
        assert_eq!((found[2].name.as_str(), found[2].len), ("own", 2), "said of one member only");
        let prefixed = changed(header("name", 0, 0), |header| {
            header[field::PREFIX][..3].copy_from_slice(b"a/b");
        });
        assert_eq!(read(&archive(&[(prefixed, b"")])).unwrap()[0].name, "a/b/name");
        let gnu = changed(prefixed, |header| header[field::MAGIC].copy_from_slice(b"ustar  \0"));
        assert_eq!(read(&archive(&[(gnu, b"")])).unwrap()[0].name, "name");
    }

    #[test]
    fn sizes_are_octal_or_in_base_256() {
        for size in [0, 1, OCTAL_MAX, OCTAL_MAX + 1, 1 << 40, i64::MAX as u64] {
            assert_eq!(number(&header("x", size, 0)[field::SIZE]), Some(size));
        }
        assert_eq!(number(b"   17\0 \0"), Some(0o17));
        assert_eq!(number(b"\0\0\0\0"), Some(0));
        for bad in [&b"18"[..], b"1 1", b"-1", b"\xff\xff\xff\xff", b"\x80\x80\0\0\0\0\0\0\0"] {
            assert_eq!(number(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn what_is_damaged_is_said_with_its_place() {
        let bytes = archive(&[(header("a.ovf", 3, 0), b"abc"), (header("b", 900, 0), &[1; 900])]);
        let fails = |bytes: &[u8], words: &str| {
            let error = read(bytes).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        fails(&bytes[..2000], "at offset 0x400: found a member of 900 bytes in a file of 2000");
        fails(&bytes[..1100], "the end of the file after 76 bytes");
        fails(b"", "a tar file");
        fails(&[0; 2048], "a tar file");
        let mut damaged = bytes.clone();
        damaged[1024] ^= 1;
        fails(&damaged, "checksum");
        let endless = header("a", u64::MAX >> 1, 0);
        fails(&archive(&[(endless, b"")]), "members that end before the file does");
        fails(&archive(&[(of_kind("s", 0, b'S'), b"")]), "sparse");
        fails(&archive(&[(of_kind("m", 0, b'M'), b"")]), "volume");
        let sparse = b"25 GNU.sparse.realsize=9\n";
        let pax = of_kind("x", sparse.len() as u64, b'x');
        fails(&archive(&[(pax, sparse), (header("a", 0, 0), b"")]), "sparse");
        for text in [&b"9 path\n"[..], b"900 path=a\n", b"path=a\n", b"0 \n", b"5 a=\n\n"] {
            let pax = of_kind("x", text.len() as u64, b'x');
            fails(&archive(&[(pax, text), (header("a", 0, 0), b"")]), "records of pax");
        }
        let long = [b'a'; 5000];
        let named = of_kind("x", long.len() as u64, b'L');
        fails(&archive(&[(named, &long), (header("a", 0, 0), b"")]), "limit");
        let huge = of_kind("x", 2 << 20, b'L');
        fails(&archive(&[(huge, &vec![b'a'; 2 << 20])]), "limit");
    }

    #[test]
    fn signed_checksums_of_old_writers_are_taken() {
        let mut old = changed(header("\u{e4}", 0, 0), |_| {});
        let (_, signed) = checksums(&old);
        let digits = format!("{signed:06o}\0 ");
        old[field::CHECKSUM].copy_from_slice(digits.as_bytes());
        assert_eq!(read(&archive(&[(old, b"")])).unwrap()[0].name, "\u{e4}");
    }

    #[test]
    fn a_head_tells_the_first_name() {
        let bytes = archive(&[(header("a.ovf", 9000, 0), &[b'x'; 9000])]);
        assert_eq!(first_name(&bytes[..512]).as_deref(), Some("a.ovf"));
        assert_eq!(first_name(&bytes[..511]), None);
        assert_eq!(first_name(b"QFI\xfb"), None);
        assert_eq!(first_name(&[]), None);
    }
}
