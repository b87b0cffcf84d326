//! Whether an image from a stranger is safe to accept: `inspect FILE`.

use vdkit::jobs::inspect::{InspectOptions, inspect};
use vdkit::storage::FileOptions;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Some(file) = std::env::args().nth(1) else { return Err("usage: inspect FILE".into()) };
    let storage = vdkit::registry().open_storage(file.as_ref(), &FileOptions::read_only())?;
    let report = inspect(storage, &InspectOptions::default())?;
    println!("{}: {:?}", report.format, report.verdict);
    for finding in &report.findings {
        println!("  {finding:?}");
    }
    Ok(())
}
