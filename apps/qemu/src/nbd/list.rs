//! `qemu-nbd --list`: the exports of a server.

use vdkit::Error;
use vdkit::nbd_client::{DescribedExport, describe_exports, flag, percent};

use super::{PORT, tls};
use crate::failure::{Failure, system_words, words};
use crate::getopt::Parsed;
use crate::output::Output;
use crate::secrets::Objects;
use crate::sockets;

/// Options that QEMU refuses beside `--list`.
const OF_A_DEVICE: &[&str] = &[
    "aio",
    "allocation-depth",
    "bitmap",
    "cache",
    "connect",
    "description",
    "discard",
    "export-name",
    "format",
    "load-snapshot",
    "nocache",
    "offset",
];

/// The names of transmission flags, in the order in which QEMU prints them.
const FLAGS: &[(u16, &str)] = &[
    (flag::READ_ONLY, "readonly"),
    (flag::SEND_FLUSH, "flush"),
    (flag::SEND_FUA, "fua"),
    (flag::ROTATIONAL, "rotational"),
    (flag::SEND_TRIM, "trim"),
    (flag::SEND_WRITE_ZEROES, "zeroes"),
    (flag::SEND_DF, "df"),
    (flag::CAN_MULTI_CONN, "multi"),
    (flag::SEND_RESIZE, "resize"),
    (flag::SEND_CACHE, "cache"),
    (flag::SEND_FAST_ZERO, "fast-zero"),
    (flag::BLOCK_STATUS_PAYLOAD, "block-status-payload"),
];

/// Lists the exports of the server that the options name.
///
/// # Errors
/// Options that contradict `--list`; the server cannot be reached or lists nothing.
pub fn run(parsed: &Parsed, out: &mut Output) -> Result<(), Failure> {
    check(parsed)?;
    let objects = Objects::of(parsed)?;
    let tls = tls::client(parsed, &objects)?;
    let scheme = if tls.is_some() { "nbds" } else { "nbd" };
    let (user, options) = tls.unwrap_or_default();
    let (uri, place) = match parsed.last("socket") {
        Some(path) if !path.starts_with('/') => {
            return Err(Failure::new("socket path must be absolute"));
        }
        Some(path) => {
            let uri = format!("{scheme}+unix://{user}/?socket={}&{options}", percent(path));
            (uri, path.to_owned())
        }
        None => {
            let host = parsed.last("bind").unwrap_or("127.0.0.1");
            let port = parsed.last("port").unwrap_or(PORT);
            let shown = format!("{host}:{port}");
            let host = if host.contains(':') { format!("[{host}]") } else { percent(host) };
            (format!("{scheme}://{user}{host}:{port}/?{options}"), shown)
        }
    };
    let exports = describe_exports(&uri).map_err(|error| failed(&place, &error))?;
    out.text(text(&exports));
    Ok(())
}

fn check(parsed: &Parsed) -> Result<(), Failure> {
    if !parsed.operands.is_empty() {
        return Err(Failure::new("List mode is incompatible with a file name"));
    }
    if OF_A_DEVICE.iter().any(|name| parsed.has(name)) {
        return Err(Failure::new("List mode is incompatible with per-device settings"));
    }
    if parsed.has("fork") {
        return Err(Failure::new("List mode is incompatible with forking"));
    }
    if sockets::count() > 0 {
        return Err(Failure::new("List mode is incompatible with socket activation"));
    }
    Ok(())
}

/// The failure to list, in QEMU's words if the server cannot be reached.
fn failed(place: &str, error: &Error) -> Failure {
    let Error::File { source, .. } = error else { return Failure::new(words(error)) };
    let text = system_words(source);
    // The client turns the kind of a missing socket into text, so that no caller takes the name for
    // a file's.
    match source.raw_os_error().is_some() || text == "No such file or directory" {
        true => Failure::new(format!("Failed to connect to '{place}': {text}")),
        false => Failure::new(text),
    }
}

fn text(exports: &[DescribedExport]) -> String {
    let mut text = format!("exports available: {}\n", exports.len());
    for export in exports {
        text += &format!(" export: '{}'\n", export.listed.name);
        if let Some(description) = export.listed.description.as_deref().filter(|d| !d.is_empty()) {
            text += &format!("  description: {description}\n");
        }
        if let Some(info) = export.info.as_ref().filter(|info| info.flags & flag::HAS_FLAGS != 0) {
            text += &format!("  size:  {}\n  flags: {:#x} (", info.bytes, info.flags);
            for (_, name) in FLAGS.iter().filter(|(flag, _)| info.flags & flag != 0) {
                text += &format!(" {name}");
            }
            text += " )\n";
            for (name, bytes) in
                ["min", "opt", "max"].iter().zip(info.block_bytes.unwrap_or_default())
            {
                if bytes != 0 {
                    text += &format!("  {name} block: {bytes}\n");
                }
            }
        }
        let bits = if export.extended { 64 } else { 32 };
        text += &format!("  transaction size: {bits}-bit\n");
        if !export.contexts.is_empty() {
            text += &format!("  available meta contexts: {}\n", export.contexts.len());
            for context in &export.contexts {
                text += &format!("   {context}\n");
            }
        }
    }
    text
}
