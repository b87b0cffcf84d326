//! All command lines of `dev/differential`, by QEMU's `qemu-img` and by vdkit under that name. Fails
//! if something differs that the table does not allow, or if an entry of the table is not used.
//!
//! `cargo bench -p vdkit-cli --bench qemu_differential -- [--filter TEXT] [--shown N]`

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;

use vdkit_differential::{cases, run};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1).cloned()
    };
    let path = std::env::var_os("PATH").unwrap_or_default();
    let reference: PathBuf = std::env::split_paths(&path)
        .map(|folder| folder.join("qemu-img"))
        .find(|program| program.exists())
        .expect("qemu-img on PATH");
    let folder = tempfile::tempdir().expect("a scratch folder");
    // Another user runs it in some cases.
    let mode = PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), mode).expect("a scratch folder");
    let candidate = folder.path().join("qemu-img");
    symlink(env!("CARGO_BIN_EXE_vdkit"), &candidate).expect("a link");
    let mut cases = cases::all();
    let filter = value("--filter");
    if let Some(filter) = &filter {
        cases.retain(|case| case.line().contains(filter));
    }
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    let summary = run(&reference, &candidate, &cases, threads);
    let shown = value("--shown").and_then(|text| text.parse().ok()).unwrap_or(3);
    print!("{}", summary.report(shown));
    for (id, count) in &summary.allowed {
        println!("allowed '{id}' {count} times");
    }
    let unused: Vec<_> = summary.unused().collect();
    if filter.is_none() && !unused.is_empty() {
        println!("not used: {unused:?}");
    }
    let failed = !summary.differing.is_empty() || (filter.is_none() && !unused.is_empty());
    std::process::exit(i32::from(failed));
}
