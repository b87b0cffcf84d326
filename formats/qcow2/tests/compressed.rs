//! Clusters that QEMU compressed.

mod common;

use std::sync::Arc;

use common::scratch;
use vdkit_block::{FormatDriver, GuestOffset, Limits, OpenRequest, Place};
use vdkit_qcow2::Qcow2Driver;
use vdkit_storage::{FileOptions, FileStorage};
use vdkit_testbase::{qemu, require_peer};

/// Text-like, constant and random ranges, so that clusters compress to all lengths, some not at
/// all.
fn guest_data(len: usize) -> Vec<u8> {
    let mut state = 0x1234_5678_9abc_def0_u64;
    (0..len)
        .map(|i| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            match (i >> 14) % 4 {
                0 => b"clusters pack to all lengths"[(state >> 40) as usize % 28],
                1 => 0x5a,
                2 => (state >> 32) as u8 & 0x0f,
                _ => (state >> 32) as u8,
            }
        })
        .collect()
}

#[test]
fn what_qemu_compressed_unpacks_to_what_it_was() {
    if !require_peer("qemu-img") {
        return;
    }
    let (dir, path) = scratch("a.qcow2");
    let source = dir.path().join("a.raw");
    let data = guest_data(5 << 20);
    std::fs::write(&source, &data).unwrap();
    for method in ["zlib", "zstd"] {
        for cluster in ["512", "4K", "64K", "2M"] {
            let options = format!("cluster_size={cluster},compression_type={method}");
            let _ = std::fs::remove_file(&path);
            qemu::convert((&source, "raw"), (&path, "qcow2"), &["-c", "-o", &options]);
            let storage = Arc::new(FileStorage::open(&path, &FileOptions::read_only()).unwrap());
            let limits = Limits::default();
            let request = OpenRequest { storage, files: Vec::new(), writable: false, limits };
            let image = Qcow2Driver.open(request).unwrap();
            let (mut at, mut unpacked) = (0, 0);
            while at < image.guest_bytes() {
                let extent = image.resolve(GuestOffset(at), image.guest_bytes() - at).unwrap();
                let wanted = &data[at as usize..][..extent.len as usize];
                match extent.place {
                    Place::Compressed(compressed) => {
                        let mut bytes = vec![0; compressed.len as usize];
                        image
                            .file(compressed.file)
                            .read_padded(&mut bytes, compressed.offset)
                            .unwrap();
                        let mut out = vec![0; compressed.unpacked_len as usize];
                        image.unpack(&compressed, &bytes, &mut out).unwrap();
                        let found = &out[compressed.skip as usize..][..wanted.len()];
                        assert!(found == wanted, "{options} at {at:#x}");
                        unpacked += 1;
                    }
                    Place::Data { file, offset, .. } => {
                        let mut out = vec![0; wanted.len()];
                        image.file(file).read_at(&mut out, offset).unwrap();
                        assert!(out == wanted, "{options} at {at:#x}");
                    }
                    other => panic!("{options} at {at:#x}: {other:?}"),
                }
                at += extent.len;
            }
            assert!(unpacked >= 2, "{options}: {unpacked}");
        }
    }
}
