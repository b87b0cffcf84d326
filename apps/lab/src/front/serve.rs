//! Starts image servers: vdkit and its peers, with the options that their manuals give.

use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::error::{Context, Result, bail};

use vdkit_block::CacheMode;

use super::{Aio, READY, Server, name_of};
use crate::engine::Bench;
use crate::layout::Image;
use crate::peers::{need, skip};
use crate::process::{Line, Running};

/// Serves an image over NBD at a socket.
pub(super) fn nbd(
    bench: &mut Bench<'_>,
    server: Server,
    image: &Image,
    cache: CacheMode,
    socket: &Path,
) -> Result<Running> {
    let at = socket.display();
    let line = match server {
        Server::Vdkit => bench
            .vdkit(&["serve", "-f", image.format, "--cache", &cache.to_string()])
            .arg("--nbd")
            .arg(format!("unix:{at}"))
            .arg(&image.path),
        Server::QemuNbd => Line::new(need("qemu-nbd")?)
            .args(["--persistent", "--shared=64", "-f", image.format])
            .arg(format!("--cache={cache}"))
            .arg(format!("--socket={at}"))
            .arg(&image.path),
        Server::StorageDaemon(aio) => storage_daemon(image, cache, aio)?
            .arg("--nbd-server")
            .arg(format!("addr.type=unix,addr.path={at},max-connections=64"))
            .arg("--export")
            .arg(format!("type=nbd,id=export,node-name=disk,writable=on{}", through(cache))),
        Server::Nbdkit => nbdkit(image, cache, socket)?,
    };
    let mut running = bench.start(&line)?;
    running.wait_until(READY, &bench.cancel, || UnixStream::connect(socket).is_ok())?;
    Ok(running)
}

fn nbdkit(image: &Image, cache: CacheMode, socket: &Path) -> Result<Line> {
    if image.format != "raw" {
        return skip("nbdkit serves raw images");
    }
    if cache != CacheMode::Writeback {
        return skip(format!("nbdkit has no cache mode '{cache}' for files"));
    }
    let line = Line::new(need("nbdkit")?).args(["--foreground", "--unix"]).arg(socket);
    Ok(line.arg("file").arg(&image.path))
}

/// The storage daemon's command line with the image as node `disk`.
fn storage_daemon(image: &Image, cache: CacheMode, aio: Aio) -> Result<Line> {
    if aio == Aio::Native && !cache.direct() {
        return skip("QEMU takes aio=native only past the page cache: cache none or directsync");
    }
    let line = Line::new(need("qemu-storage-daemon")?);
    let nodes = nodes(image, cache, aio)?;
    Ok(nodes.into_iter().fold(line, |line, node| line.arg("--blockdev").arg(node)))
}

/// QEMU's node definitions for an image, whose node is `disk`.
pub(super) fn nodes(image: &Image, cache: CacheMode, aio: Aio) -> Result<[String; 2]> {
    let path = name_of(&image.path)?.replace(',', ",,");
    let driver = if image.device { "host_device" } else { "file" };
    let switch = |on| if on { "on" } else { "off" };
    let (direct, no_flush) = (switch(cache.direct()), switch(cache == CacheMode::Unsafe));
    let flags = format!("cache.direct={direct},cache.no-flush={no_flush}");
    let format = image.format;
    let aio = aio.option();
    Ok([
        format!("driver={driver},node-name=file,filename={path},{flags},discard=unmap{aio}"),
        format!("driver={format},node-name=disk,file=file,{flags},discard=unmap"),
    ])
}

fn through(cache: CacheMode) -> &'static str {
    if cache.write_durable() { ",writethrough=on" } else { "" }
}

/// Serves the disk as one plain file over FUSE.
pub(super) fn fuse(
    bench: &mut Bench<'_>,
    server: Server,
    image: &Image,
    cache: CacheMode,
    file: &Path,
) -> Result<Running> {
    let line = match server {
        Server::Vdkit => bench
            .vdkit(&["mount", "-f", image.format, "--cache", &cache.to_string()])
            .arg(&image.path)
            .arg(file),
        Server::StorageDaemon(aio) => {
            std::fs::write(file, "").with_context(|| file.display().to_string())?;
            let mountpoint = file.display();
            storage_daemon(image, cache, aio)?.arg("--export").arg(format!(
                "type=fuse,id=export,node-name=disk,mountpoint={mountpoint},writable=on{}",
                through(cache)
            ))
        }
        other => bail!("{other:?} shows no files"),
    };
    let mut running = bench.start(&line)?;
    let bytes = image.shown_bytes;
    running.wait_until(READY, &bench.cancel, || {
        file.metadata().is_ok_and(|found| found.len() == bytes)
    })?;
    Ok(running)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_is_told_of_the_cache_mode_and_of_commas() {
        let image = Image::file("/a,b/disk.qcow2".into(), "qcow2", 1);
        let none = CacheMode::None;
        let [file, disk] = nodes(&image, none, Aio::Threads).unwrap();
        assert_eq!(
            file,
            "driver=file,node-name=file,filename=/a,,b/disk.qcow2,cache.direct=on,\
             cache.no-flush=off,discard=unmap"
        );
        assert!(disk.starts_with("driver=qcow2,node-name=disk,file=file,cache.direct=on"));
        let image = Image { device: true, ..image };
        let [file, _] = nodes(&image, CacheMode::Unsafe, Aio::Threads).unwrap();
        assert!(file.contains("driver=host_device") && file.contains("no-flush=on"), "{file}");
        for (aio, word) in [(Aio::Native, ",aio=native"), (Aio::Uring, ",aio=io_uring")] {
            let [file, disk] = nodes(&image, none, aio).unwrap();
            assert!(file.ends_with(word) && !disk.contains("aio="), "{file} {disk}");
        }
        // A combination that QEMU would refuse is reported before QEMU is started.
        let told =
            storage_daemon(&image, CacheMode::Writeback, Aio::Native).unwrap_err().to_string();
        assert!(told.contains("past the page cache"), "{told}");
    }
}
