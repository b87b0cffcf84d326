//! Serves an image to NBD clients until Enter is pressed: `serve FILE SOCKET`.

use std::time::Duration;

use vdkit::nbd::{Address, Exports, Listener, Server, ServerOptions};
use vdkit::serve::{Export, ExportOptions};
use vdkit::{Disk, OpenOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [file, socket] = &args[..] else { return Err("usage: serve FILE SOCKET".into()) };
    let disk = Disk::open(&vdkit::registry(), file, &OpenOptions::read_write())?;
    let export = Export::new(disk, ExportOptions::default());
    let listener = Listener::bind(&Address::Unix(socket.into()))?;
    println!("{}", listener.uri("", false));
    let exports = Exports::new(vec![export.clone()]);
    let server = Server::start(exports, vec![listener], ServerOptions::default())?;
    std::io::stdin().read_line(&mut String::new())?;
    // Clients get a second to finish.
    server.stop(Duration::from_secs(1));
    export.close()?;
    Ok(())
}
