//! A disk as a file, by the traits of `std::io`.

mod support;

use std::io::{BufReader, ErrorKind, Read, Seek, SeekFrom, Write, copy};
use std::sync::Arc;

use vdkit_storage::MemoryStorage;

const BYTES: usize = 10_000;

fn content() -> Vec<u8> {
    (0..BYTES).map(|i| (i / 7) as u8).collect()
}

#[test]
fn a_disk_is_read_written_and_sought_like_a_file() {
    let disk = support::raw_disk(Arc::new(MemoryStorage::from_bytes("disk", &content())), true);
    let mut all = Vec::new();
    BufReader::new(disk.stream()).read_to_end(&mut all).unwrap();
    assert_eq!(all.len() as u64, disk.guest_bytes());
    assert_eq!(all[..BYTES], content());

    let mut stream = disk.stream();
    assert_eq!(stream.seek(SeekFrom::End(-4)).unwrap(), disk.guest_bytes() - 4);
    assert_eq!(stream.write(b"abcdefgh").unwrap(), 4, "a short write at the end");
    assert_eq!(stream.write(b"efgh").unwrap_err().kind(), ErrorKind::StorageFull);
    assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0, "the end");
    assert_eq!(stream.write(b"").unwrap(), 0);
    stream.flush().unwrap();
    stream.seek(SeekFrom::Current(-4)).unwrap();
    let mut end = String::new();
    stream.read_to_string(&mut end).unwrap();
    assert_eq!(end, "abcd");
    assert_eq!(
        stream.seek(SeekFrom::Current(-1 << 40)).unwrap_err().kind(),
        ErrorKind::InvalidInput
    );
    stream.seek(SeekFrom::Start(1 << 40)).unwrap();
    assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0, "beyond the end");
}

#[test]
fn a_read_only_disk_is_not_written() {
    let disk = support::raw_disk(Arc::new(MemoryStorage::from_bytes("disk", &content())), false);
    let refused = disk.stream().write(b"x").unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "{refused}");
    let mut copied = Vec::new();
    copy(&mut disk.stream().take(100), &mut copied).unwrap();
    assert_eq!(copied, content()[..100]);
}
