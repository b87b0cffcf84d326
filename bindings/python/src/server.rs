//! Disks for NBD clients and for a virtual machine.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pyo3::prelude::*;
use vdkit::nbd::{self, Address, Exports, Listener, ServerOptions, Tls};
use vdkit::serve::{Export, ExportOptions, OnNoSpace};
use vdkit::{Error, IoAction, Result, vhost_user};

use crate::disk::Disk;
use crate::errors::raise;

/// A running server.
#[pyclass(frozen, module = "vdkit._vdkit")]
pub(crate) struct Server {
    export: Arc<Export>,
    running: Mutex<Option<Running>>,
    uri: String,
}

enum Running {
    Nbd(nbd::Server),
    Vhost(vhost_user::Server),
}

fn failed_to_open(file: &str, source: std::io::Error) -> Error {
    Error::File { file: file.to_owned(), action: IoAction::Open, source }
}

fn export_options(name: String, read_only: bool, report_no_space: bool) -> ExportOptions {
    let mut options = ExportOptions::default();
    (options.name, options.read_only) = (name, read_only);
    if report_no_space {
        options.on_nospace = OnNoSpace::Report;
    }
    options
}

/// Starts a server for a disk, which is closed if that fails. `listen`: what can fail before the disk is
/// exported.
fn start<L>(
    py: Python<'_>,
    disk: &Bound<'_, Disk>,
    options: ExportOptions,
    listen: impl FnOnce() -> Result<L> + Send,
    begin: impl FnOnce(&Arc<Export>, L) -> Result<(Running, String)> + Send,
) -> PyResult<Server> {
    let disk = disk.get().take(py)?;
    let started = py.detach(|| {
        // Its writes would change a map that the parent changes too.
        let allowed = if disk.writable() { disk.refuse_in_child("serve") } else { Ok(()) };
        let listener = match allowed.and_then(|()| listen()) {
            Ok(listener) => listener,
            Err(error) => {
                // The first error is raised.
                let _ = disk.close();
                return Err(error);
            }
        };
        let export = Export::new(disk, options);
        match begin(&export, listener) {
            Ok((running, uri)) => Ok(Server { export, running: Mutex::new(Some(running)), uri }),
            Err(error) => {
                let _ = export.close();
                Err(error)
            }
        }
    });
    started.map_err(|error| raise(py, &error))
}

#[pyfunction]
pub(crate) fn serve(
    py: Python<'_>,
    disk: &Bound<'_, Disk>,
    address: &str,
    name: String,
    read_only: bool,
    report_no_space: bool,
    tls: Option<PathBuf>,
) -> PyResult<Server> {
    let listen = || {
        let parsed: Address = address.parse().map_err(Error::invalid)?;
        let tls = tls.map(|folder| {
            // First the folder itself, whose error has an errno.
            std::fs::metadata(&folder)
                .and_then(|_| Tls::from_folder(&folder))
                .map_err(|source| failed_to_open(&folder.display().to_string(), source))
        });
        let tls = tls.transpose()?;
        let listener = Listener::bind(&parsed).map_err(|source| failed_to_open(address, source))?;
        Ok((listener, tls))
    };
    let options = export_options(name, read_only, report_no_space);
    start(py, disk, options, listen, |export, (listener, tls)| {
        let uri = listener.uri(&export.options().name, tls.is_some());
        let mut options = ServerOptions::default();
        options.tls = tls;
        let exports = Exports::new(vec![export.clone()]);
        let running = nbd::Server::start(exports, vec![listener], options)
            .map_err(|source| failed_to_open(address, source))?;
        Ok((Running::Nbd(running), uri))
    })
}

#[pyfunction]
pub(crate) fn serve_vhost_user(
    py: Python<'_>,
    disk: &Bound<'_, Disk>,
    path: PathBuf,
    read_only: bool,
    report_no_space: bool,
) -> PyResult<Server> {
    let name = path.display().to_string();
    let failed = |source| failed_to_open(&name, source);
    let listen = || vhost_user::Listener::bind(&path).map_err(failed);
    let options = export_options(String::new(), read_only, report_no_space);
    start(py, disk, options, listen, |export, listener| {
        let uri = listener.uri();
        let options = vhost_user::ServerOptions::default();
        let running = vhost_user::Server::start(export.clone(), listener, options);
        Ok((Running::Vhost(running.map_err(failed)?), uri))
    })
}

#[pymethods]
impl Server {
    #[getter]
    fn uri(&self) -> &str {
        &self.uri
    }

    #[getter]
    fn clients(&self, py: Python<'_>) -> usize {
        py.detach(|| match &*self.running.lock() {
            Some(Running::Nbd(server)) => server.connections(),
            Some(Running::Vhost(server)) => server.connected().into(),
            None => 0,
        })
    }

    /// Ends it; requests of NBD clients that have begun have so many seconds. May be called again. A
    /// child of fork() ends nothing: the server is its parent's.
    fn stop(&self, py: Python<'_>, drain: f64) -> PyResult<()> {
        // `inf`, and what no clock can tell, is no limit.
        let most = if drain > 0.0 { Duration::MAX } else { Duration::ZERO };
        let drain = Duration::try_from_secs_f64(drain).unwrap_or(most);
        self.end(py, drain).map_err(|error| raise(py, &error))
    }
}

impl Server {
    /// Without the interpreter's lock, which a request needs whose disk is a file object.
    fn end(&self, py: Python<'_>, drain: Duration) -> Result<()> {
        if self.export.is_inherited() {
            return Ok(());
        }
        py.detach(|| {
            let running = self.running.lock().take();
            match running {
                Some(Running::Nbd(running)) => {
                    self.export.end_waiting();
                    running.stop(drain);
                }
                Some(Running::Vhost(running)) => {
                    self.export.resume();
                    // A request that is answered after the flush would be lost with the process.
                    running.stop(Duration::MAX);
                }
                None => return Ok(()),
            }
            self.export.close()
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.export.is_inherited() {
            // No lock is taken to drop it: a thread that the child does not have may hold that.
            return std::mem::forget(self.running.get_mut().take());
        }
        // Nobody is there to get an error.
        let _ = Python::attach(|py| self.end(py, Duration::ZERO));
    }
}
