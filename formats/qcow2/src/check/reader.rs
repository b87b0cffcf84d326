//! Reads many metadata clusters in batches; if there are many, one batch ahead of their use.

use std::sync::mpsc;

use vdkit_block::{HostOffset, Monitor, ReadOp, Result, Storage};

/// Most tables of one batch.
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
    /// A meter at zero.
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
/// index, in order. If there are many batches, another thread reads the next one meanwhile.
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
        let tables = tables.div_ceil(2);
        let mut buffer = vec![0; offsets.len().min(tables) * cluster];
        for (i, batch) in offsets.chunks(tables).enumerate() {
            let bytes = &mut buffer[..batch.len() * cluster];
            read_clusters(storage, batch, cluster, bytes)?;
            consume(i * tables, bytes)?;
        }
        return Ok(());
    }
    std::thread::scope(|scope| {
        let (filled_out, filled) = mpsc::sync_channel::<Result<Vec<u8>>>(1);
        let (empty_out, empty) = mpsc::channel::<Vec<u8>>();
        for _ in 0..2 {
            let _ = empty_out.send(vec![0; tables * cluster]);
        }
        scope.spawn(move || {
            for batch in offsets.chunks(tables) {
                // Both channels disconnect if the consumer stops early.
                let Ok(mut buffer) = empty.recv() else { return };
                buffer.resize(batch.len() * cluster, 0);
                let read = read_clusters(storage, batch, cluster, &mut buffer);
                if filled_out.send(read.map(|()| buffer)).is_err() {
                    return;
                }
            }
        });
        for (i, _) in offsets.chunks(tables).enumerate() {
            let Ok(buffer) = filled.recv() else { break };
            let buffer = buffer?;
            consume(i * tables, &buffer)?;
            let _ = empty_out.send(buffer);
        }
        Ok(())
    })
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

/// Reads a whole table; bytes beyond the end of the file are zero.
pub(crate) fn read_table(storage: &dyn Storage, offset: u64, bytes: u64) -> Result<Vec<u8>> {
    let mut table = vec![0; bytes as usize];
    storage.read_padded(&mut table, HostOffset(offset))?;
    Ok(table)
}
