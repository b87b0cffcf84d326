//! Reads many metadata clusters in batches; if there are many, one batch ahead of their use.

use std::sync::mpsc;

use vdkit_block::{HostOffset, Monitor, ReadOp, Result, Storage};

const BATCH_TABLES: usize = 64;
/// Most tables of one batch if clusters are small.
const BATCH_TABLES_SMALL: usize = 1024;
/// Most bytes of one batch, unless a single cluster is larger.
const BATCH_BYTES: usize = 4 << 20;
/// Up to this many batches are read without a read-ahead thread, in half-size batches: one small,
/// reused buffer is faster than two large ones, since first touching memory costs as much as
/// reading into it.
const BATCHES_ALONE: usize = 8;

/// Progress of a job over several walks.
#[derive(Debug)]
pub(crate) struct Meter<'a, 'b> {
    pub(crate) monitor: &'a Monitor<'b>,
    done: u64,
    total: u64,
}

impl<'a, 'b> Meter<'a, 'b> {
    pub(crate) fn new(monitor: &'a Monitor<'b>) -> Self {
        Self { monitor, done: 0, total: 0 }
    }

    /// Announces `bytes` more bytes to read.
    pub(crate) fn expect(&mut self, bytes: u64) {
        self.total += bytes;
    }

    fn advance(&mut self, bytes: u64) -> Result<()> {
        self.done += bytes;
        self.monitor.progress.update(self.done, self.total);
        self.monitor.cancel.check()
    }
}

fn batch_tables(cluster_bytes: usize) -> usize {
    let most = if cluster_bytes < 4096 { BATCH_TABLES_SMALL } else { BATCH_TABLES };
    (BATCH_BYTES / cluster_bytes).clamp(1, most)
}

/// Reads the clusters at `offsets` (preferably sorted) and passes each to `use_table` with its
/// index, in order. If there are many batches, another thread, if it can be started, reads the next
/// one meanwhile.
pub(crate) fn for_each_cluster(
    storage: &dyn Storage,
    offsets: &[u64],
    cluster_bytes: u64,
    meter: &mut Meter<'_, '_>,
    mut use_table: impl FnMut(usize, &[u8]) -> Result<()>,
) -> Result<()> {
    let cluster = cluster_bytes as usize;
    let tables = batch_tables(cluster);
    meter.expect(offsets.len() as u64 * cluster_bytes);
    let mut consume = |first: usize, bytes: &[u8]| {
        for (i, table) in bytes.chunks_exact(cluster).enumerate() {
            use_table(first + i, table)?;
        }
        meter.advance(bytes.len() as u64)
    };
    if offsets.len() <= tables * BATCHES_ALONE {
        return read_alone(storage, offsets, cluster, tables.div_ceil(2), consume);
    }
    std::thread::scope(|scope| {
        let (filled_out, filled) = mpsc::sync_channel::<Result<Vec<u8>>>(1);
        let (empty_out, empty) = mpsc::channel::<Vec<u8>>();
        for _ in 0..2 {
            let _ = empty_out.send(vec![0; tables * cluster]);
        }
        let read_ahead = move || {
            for batch in offsets.chunks(tables) {
                // Both channels disconnect if the consumer stops early.
                let Ok(mut buffer) = empty.recv() else { return };
                buffer.resize(batch.len() * cluster, 0);
                let read = read_clusters(storage, batch, cluster, &mut buffer);
                if filled_out.send(read.map(|()| buffer)).is_err() {
                    return;
                }
            }
        };
        if std::thread::Builder::new().spawn_scoped(scope, read_ahead).is_err() {
            return read_alone(storage, offsets, cluster, tables, consume);
        }
        for (i, _) in offsets.chunks(tables).enumerate() {
            let Ok(buffer) = filled.recv() else { break };
            let buffer = buffer?;
            consume(i * tables, &buffer)?;
            let _ = empty_out.send(buffer);
        }
        Ok(())
    })
}

/// Reads the clusters in batches of `tables`, on this thread.
fn read_alone(
    storage: &dyn Storage,
    offsets: &[u64],
    cluster: usize,
    tables: usize,
    mut consume: impl FnMut(usize, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut buffer = vec![0; offsets.len().min(tables) * cluster];
    for (i, batch) in offsets.chunks(tables).enumerate() {
        let bytes = &mut buffer[..batch.len() * cluster];
        read_clusters(storage, batch, cluster, bytes)?;
        consume(i * tables, bytes)?;
    }
    Ok(())
}

/// Reads one batch; consecutive clusters are one request.
fn read_clusters(
    storage: &dyn Storage,
    offsets: &[u64],
    cluster: usize,
    mut buffer: &mut [u8],
) -> Result<()> {
    let mut ops = Vec::with_capacity(offsets.len());
    let mut at = 0;
    while at < offsets.len() {
        let run = 1 + offsets[at..]
            .windows(2)
            .take_while(|pair| pair[0].checked_add(cluster as u64) == Some(pair[1]))
            .count();
        let (buf, rest) = buffer.split_at_mut(run * cluster);
        ops.push(ReadOp { offset: HostOffset(offsets[at]), buf });
        buffer = rest;
        at += run;
    }
    storage.read_batch(&mut ops)
}

#[cfg(test)]
mod tests {
    use vdkit_storage::MemoryStorage;
    use vdkit_testbase::{run_threadless, threadless_argument};

    use super::*;

    const CLUSTER: u64 = 512;
    /// Enough for a thread that reads ahead.
    const CLUSTERS: u64 = (BATCH_TABLES_SMALL * BATCHES_ALONE) as u64 + 100;

    fn read_all() {
        let storage = MemoryStorage::with_len("image", CLUSTERS * CLUSTER);
        let offsets: Vec<u64> = (0..CLUSTERS).map(|cluster| cluster * CLUSTER).collect();
        for offset in &offsets {
            storage.write_at(&offset.to_be_bytes(), HostOffset(*offset)).unwrap();
        }
        let monitor = Monitor::default();
        let mut meter = Meter::new(&monitor);
        let mut used = Vec::new();
        let note = |index: usize, table: &[u8]| {
            assert_eq!(table[..8], offsets[index].to_be_bytes());
            used.push(index);
            Ok(())
        };
        for_each_cluster(&storage, &offsets, CLUSTER, &mut meter, note).unwrap();
        assert!(used.into_iter().eq(0..offsets.len()));
    }

    #[test]
    fn many_clusters_are_read_with_and_without_a_thread() {
        read_all();
        if threadless_argument().is_none() {
            let name = "check::reader::tests::many_clusters_are_read_with_and_without_a_thread";
            run_threadless(name, "");
        }
    }
}
