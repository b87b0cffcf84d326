//! The name of the parent of a differencing image.

use std::mem::offset_of;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use vdkit_block::{HostOffset, NotedTime, Result, Storage};

use crate::footer::EPOCH;
use crate::header::DynamicHeader;
use crate::on_disk::RawHeader;

/// A relative Windows path, UTF-16.
pub(crate) const RELATIVE: [u8; 4] = *b"W2ru";
/// An absolute Windows path, UTF-16.
const ABSOLUTE: [u8; 4] = *b"W2ku";
/// A file URL, UTF-8.
pub(crate) const URL: [u8; 4] = *b"MacX";
/// What a file URL escapes.
const ESCAPED: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'/').remove(b'.').remove(b'-').remove(b'_').remove(b'~');

/// The name as a path of this system: the relative path, else a file URL, else the file name
/// without the folders of a foreign system.
///
/// # Errors
/// Those of the storage.
pub(crate) fn name(storage: &dyn Storage, header: &DynamicHeader) -> Result<String> {
    for platform in [RELATIVE, URL, ABSOLUTE] {
        for locator in header.locators().filter(|locator| locator.platform_code == platform) {
            let mut bytes = vec![0; locator.platform_data_length.get() as usize];
            let got =
                storage.read_up_to(&mut bytes, HostOffset(locator.platform_data_offset.get()))?;
            bytes.truncate(got);
            let name = if platform == URL { from_url(&bytes) } else { from_utf16(&bytes) };
            let name = match platform {
                RELATIVE => relative(&name),
                ABSOLUTE => last(&name),
                _ => name,
            };
            if !name.is_empty() {
                return Ok(name);
            }
        }
    }
    Ok(last(&header.parent_name()))
}

/// Windows writes little-endian. In big-endian order most pairs of an ASCII path begin with a zero
/// byte.
fn from_utf16(bytes: &[u8]) -> String {
    let pairs = bytes.as_chunks::<2>().0;
    let big = pairs.iter().filter(|pair| pair[0] == 0).count() * 2 > pairs.len();
    let unit = |pair: &[u8; 2]| {
        if big { u16::from_be_bytes(*pair) } else { u16::from_le_bytes(*pair) }
    };
    let units: Vec<u16> = pairs.iter().map(unit).take_while(|unit| *unit != 0).collect();
    String::from_utf16_lossy(&units)
}

fn from_url(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim_end_matches('\0');
    let Some(path) = text.strip_prefix("file://") else { return text.to_owned() };
    let path = path.strip_prefix("localhost").unwrap_or(path);
    percent_decode_str(path).decode_utf8_lossy().into_owned()
}

fn relative(name: &str) -> String {
    let name = name.replace('\\', "/");
    name.strip_prefix("./").unwrap_or(&name).to_owned()
}

/// The file name alone, as stored in the header.
pub(crate) fn last(name: &str) -> String {
    name.rsplit(['\\', '/']).next().unwrap_or_default().to_owned()
}

/// The stored form of a name: platform and bytes.
pub(crate) fn stored(name: &str) -> ([u8; 4], Vec<u8>) {
    if name.starts_with('/') {
        let url = format!("file://{}", utf8_percent_encode(name, ESCAPED));
        return (URL, url.into_bytes());
    }
    let name = format!(".\\{}", name.strip_prefix("./").unwrap_or(name).replace('/', "\\"));
    (RELATIVE, name.encode_utf16().flat_map(u16::to_le_bytes).collect())
}

/// The parent's time as stored in the header: seconds since 2000; 0 if unknown.
pub(crate) fn stamp(modified: Option<u64>) -> u32 {
    let seconds = modified.unwrap_or(0).saturating_sub(EPOCH);
    u32::try_from(seconds).unwrap_or(u32::MAX)
}

/// The parent's time in a header, if set.
pub(crate) fn noted_time(header: &DynamicHeader) -> Option<NotedTime> {
    let seconds = Some(header.parent_time()).filter(|seconds| *seconds != 0)?;
    Some(NotedTime {
        seconds: EPOCH + u64::from(seconds),
        offset: header.at.saturating_add(offset_of!(RawHeader, parent_time_stamp) as u64),
        structure: "dynamic header",
        field: "Parent Time Stamp",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_counted_from_2000() {
        for (modified, wanted) in [
            (None, 0),
            (Some(0), 0),
            (Some(EPOCH), 0),
            (Some(EPOCH + 1), 1),
            (Some(EPOCH + u64::from(u32::MAX)), u32::MAX),
            (Some(u64::MAX), u32::MAX),
        ] {
            assert_eq!(stamp(modified), wanted, "{modified:?}");
            let header = DynamicHeader::new(1536, 1, 512).with_parent_time(wanted);
            let seconds = noted_time(&header).map(|noted| noted.seconds);
            let shown = (wanted != 0).then_some(EPOCH + u64::from(wanted));
            assert_eq!(seconds, shown, "{modified:?}");
        }
    }

    #[test]
    fn names_come_back() {
        for name in ["base.vhd", "sub/base.vhd", "../base.vhd"] {
            let (platform, bytes) = stored(name);
            assert_eq!(platform, RELATIVE);
            assert_eq!(relative(&from_utf16(&bytes)), name);
        }
        let (platform, bytes) = stored("/srv/ä b/base.vhd");
        assert_eq!(platform, URL);
        assert_eq!(from_url(&bytes), "/srv/ä b/base.vhd");
        assert_eq!(last("C:\\disks\\base.vhd"), "base.vhd");
        assert_eq!(from_url(b"file://localhost/x%2"), "/x%2");
    }
}
