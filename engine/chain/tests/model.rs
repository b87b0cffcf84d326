//! Random operations on a chain, against a flat buffer.

mod support;

use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use support::map::CLUSTER;
use support::{MapFormat, Memory, map_disk, pack, raw_disk};
use vdkit_block::{Format, GuestOffset, Storage};
use vdkit_chain::{Disk, DiskPlace, OpenOptions};

#[derive(Clone, Debug)]
enum Op {
    Write {
        at: u64,
        len: u64,
        byte: u8,
    },
    Zero {
        at: u64,
        len: u64,
        may_unmap: bool,
    },
    Discard {
        at: u64,
        len: u64,
    },
    Read {
        at: u64,
        len: u64,
    },
    Pack {
        cluster: u64,
        count: u64,
        byte: u8,
    },
    /// The current layers become the backing of a new one.
    Overlay {
        grow: i64,
    },
    ShareAll,
    Flush,
    Resize {
        bytes: u64,
    },
}

const SPAN: u64 = 24 * CLUSTER;

fn range() -> impl Strategy<Value = (u64, u64)> {
    // Often small, and sometimes exactly whole clusters.
    prop_oneof![
        (0..SPAN, 1..2000u64),
        (0..SPAN, 1..SPAN),
        (0..24u64, 1..8u64).prop_map(|(at, len)| (at * CLUSTER, len * CLUSTER)),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (range(), 1..=255u8).prop_map(|((at, len), byte)| Op::Write { at, len, byte }),
        2 => (range(), any::<bool>())
            .prop_map(|((at, len), may_unmap)| Op::Zero { at, len, may_unmap }),
        1 => range().prop_map(|(at, len)| Op::Discard { at, len }),
        4 => range().prop_map(|(at, len)| Op::Read { at, len }),
        2 => (0..24u64, 1..4u64, 1..=255u8)
            .prop_map(|(cluster, count, byte)| Op::Pack { cluster, count, byte }),
        1 => (-6..6i64).prop_map(|grow| Op::Overlay { grow }),
        1 => Just(Op::ShareAll),
        1 => Just(Op::Flush),
        1 => (1..SPAN / 512).prop_map(|sectors| Op::Resize { bytes: sectors * 512 }),
    ]
}

struct Bench {
    disk: Disk,
    top: Arc<MapFormat>,
    model: Vec<u8>,
    layers: usize,
}

impl Bench {
    fn new(base: &[u8], guest_bytes: u64) -> Self {
        let base = raw_disk(Arc::new(Memory::new("base.raw", base.to_vec()).sparse()), false);
        let mut model = vec![0; guest_bytes as usize];
        let known = model.len().min(base.guest_bytes() as usize);
        base.read_at(&mut model[..known], GuestOffset(0)).unwrap();
        let (disk, top) = overlay(base, guest_bytes);
        Self { disk, top, model, layers: 2 }
    }

    fn clip(&self, at: u64, len: u64) -> Option<(u64, usize)> {
        let size = self.model.len() as u64;
        (at < size).then(|| (at, len.min(size - at) as usize))
    }

    fn run(&mut self, op: Op) {
        match op {
            Op::Write { at, len, byte } => {
                let Some((at, len)) = self.clip(at, len) else { return };
                // The value varies, so that a shift shows.
                let bytes: Vec<u8> = (0..len).map(|i| byte ^ (i / 512) as u8).collect();
                self.disk.write_at(&bytes, GuestOffset(at)).unwrap();
                self.model[at as usize..at as usize + len].copy_from_slice(&bytes);
            }
            Op::Zero { at, len, may_unmap } => {
                let Some((at, len)) = self.clip(at, len) else { return };
                self.disk.write_zeroes(GuestOffset(at), len as u64, may_unmap).unwrap();
                self.model[at as usize..at as usize + len].fill(0);
            }
            Op::Discard { at, len } => {
                let Some((at, len)) = self.clip(at, len) else { return };
                self.disk.discard(GuestOffset(at), len as u64).unwrap();
                let now = self.read(at, len);
                let old = &mut self.model[at as usize..at as usize + len];
                for (new, old) in now.iter().zip(old.iter_mut()) {
                    assert!(*new == 0 || new == old, "a discard invented a byte");
                    *old = *new;
                }
            }
            Op::Read { at, len } => {
                let Some((at, len)) = self.clip(at, len) else { return };
                assert!(self.read(at, len) == self.model[at as usize..at as usize + len]);
            }
            Op::Pack { cluster, count, byte } => {
                let whole = self.model.len() as u64 / CLUSTER;
                if cluster >= whole {
                    return;
                }
                let count = count.min(whole - cluster) as usize;
                let units: Vec<Vec<u8>> = (0..count)
                    .map(|i| pack(&vec![byte.wrapping_add(i as u8); CLUSTER as usize]))
                    .collect();
                self.disk.write_compressed(GuestOffset(cluster * CLUSTER), &units).unwrap();
                for i in 0..count {
                    let start = (cluster as usize + i) * CLUSTER as usize;
                    let unit = &mut self.model[start..start + CLUSTER as usize];
                    unit.fill(byte.wrapping_add(i as u8));
                }
            }
            Op::Overlay { grow } => {
                if self.layers > 12 {
                    return;
                }
                let size = (self.model.len() as i64 + grow * 1536).max(512) as u64;
                self.model.resize(size as usize, 0);
                self.layers += 1;
                let base = std::mem::replace(&mut self.disk, raw_disk(memory(), false));
                (self.disk, self.top) = overlay(base, size);
            }
            Op::ShareAll => self.top.share_all(),
            Op::Flush => self.disk.flush().unwrap(),
            Op::Resize { bytes } => {
                self.disk.resize(bytes).unwrap();
                self.model.resize(bytes as usize, 0);
            }
        }
    }

    fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut buf = vec![0xEE; len];
        self.disk.read_at(&mut buf, GuestOffset(at)).unwrap();
        buf
    }

    /// Compares everything, by reads and by the map.
    fn check(&self) {
        assert_eq!(self.disk.guest_bytes(), self.model.len() as u64);
        assert!(self.read(0, self.model.len()) == self.model, "a full read differs");
        let mut at = 0;
        for extent in self.disk.extents(GuestOffset(0), self.model.len() as u64).unwrap() {
            let extent = extent.unwrap();
            assert_eq!(extent.at.0, at);
            let mut bytes = vec![0; extent.len as usize];
            match extent.place {
                DiskPlace::Data { storage, offset } => {
                    storage.read_padded(&mut bytes, offset).unwrap();
                }
                DiskPlace::Compressed { .. } => self.disk.read_at(&mut bytes, extent.at).unwrap(),
                DiskPlace::Zero { .. } | DiskPlace::Hole => assert!(extent.place.reads_zero()),
            }
            let start = at as usize;
            assert!(bytes == self.model[start..start + bytes.len()], "the map differs at {at:#x}");
            at += extent.len;
        }
        assert_eq!(at, self.model.len() as u64);
        assert_eq!(self.top.reserved(), 0);
    }
}

fn memory() -> Arc<dyn Storage> {
    Arc::new(Memory::new("m", Vec::new()))
}

fn overlay(base: Disk, guest_bytes: u64) -> (Disk, Arc<MapFormat>) {
    let top = Arc::new(MapFormat::new(memory(), guest_bytes, true));
    let disk = map_disk(&top, &OpenOptions::read_write()).over(base);
    assert_eq!(disk.guest_bytes(), top.guest_bytes());
    (disk, top)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_chain_is_a_flat_buffer(
        base_len in 0..SPAN as usize,
        guest_sectors in 1..SPAN / 512,
        ops in proptest::collection::vec(op(), 1..40),
    ) {
        let base: Vec<u8> = (0..base_len).map(|i| if i / 9000 % 2 == 0 { (i / 512) as u8 | 1 } else { 0 }).collect();
        let mut bench = Bench::new(&base, guest_sectors * 512);
        for op in ops {
            bench.run(op);
        }
        bench.check();
    }
}
