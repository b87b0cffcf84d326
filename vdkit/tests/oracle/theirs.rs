//! QEMU makes a chain and writes to each image.

use std::path::Path;

use vdkit_testkit::{Rng, qemu};

use super::chain::{Case, Folder};
use super::layer::{Kind, Layer};
use super::ours;

/// vdkit reads every layer, then writes to the top one, which QEMU reads.
pub fn run(case: &Case, rng: &mut Rng) {
    let folder = Folder::new();
    for (index, layer) in case.layers.iter().enumerate() {
        create(&folder, case, index);
        let size = case.sizes[index];
        for commands in commands(folder.path(), layer, size, rng) {
            let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
            qemu::io(&folder.file(layer), layer.format(), &commands);
        }
        folder.is_sound(layer, "made by QEMU");
        let view = folder.qemu_view(layer);
        assert_eq!(view.len(), size);
        folder.reads_as(layer, &view, rng, "made by QEMU");
    }
    let top = case.layers.last().expect("a top");
    let before: Vec<_> = case.layers.iter().map(|layer| folder.qemu_view(layer)).collect();
    let mut guest = before[case.layers.len() - 1].clone();
    ours::write(&folder, top, &mut guest, 100, rng);
    ours::qemu_agrees(&folder, top, &guest, "written by QEMU, then here");
    for (layer, view) in case.layers.iter().zip(&before).rev().skip(1) {
        folder.reads_as(layer, view, rng, "beneath what was written");
        folder.is_sound(layer, "beneath what was written");
    }
}

fn create(folder: &Folder, case: &Case, index: usize) {
    let layer = &case.layers[index];
    let (options, size) = (layer.options(), case.sizes[index].to_string());
    let backing = case.backing(index);
    let mut args = vec!["create", "-q", "-f", layer.format()];
    if layer.kind != Kind::Raw {
        args.extend(["-o", &options]);
    }
    if let Some((file, format)) = &backing {
        args.extend(["-b", file, "-F", format]);
    }
    let file = layer.file();
    args.extend([file.as_str(), size.as_str()]);
    super::support::qemu::img(folder.path(), &args);
}

/// Commands for qemu-io, one list per call. Patterns come from files, so that bytes identify their
/// offset.
fn commands(dir: &Path, layer: &Layer, size: u64, rng: &mut Rng) -> Vec<Vec<String>> {
    let mut calls = Vec::new();
    if layer.compressed.is_some() {
        calls.push(compressed_writes(dir, layer, size, rng));
    }
    let mut commands = Vec::new();
    for _ in 0..10 {
        let at = rng.below(size);
        let most = (size - at).min(layer.cluster.clamp(8 << 10, 512 << 10) * 3);
        let len = 1 + rng.below(most);
        // Zeroes and discards are in whole sectors.
        let (sector, sectors) = (at / 512 * 512, len.div_ceil(512) * 512);
        let sectors = sectors.min(size - sector);
        commands.push(match rng.below(10) {
            0 => format!("write -z {sector} {sectors}"),
            1 => format!("write -z -u {sector} {sectors}"),
            2 => format!("discard {sector} {sectors}"),
            3 => "flush".to_owned(),
            _ => format!("write -s {} {at} {len}", pattern(dir, 997, rng)),
        });
    }
    calls.push(commands);
    calls
}

/// Compressed writes of whole unallocated clusters: QEMU refuses others.
fn compressed_writes(dir: &Path, layer: &Layer, size: u64, rng: &mut Rng) -> Vec<String> {
    let clusters = size.div_ceil(layer.cluster);
    let mut commands = Vec::new();
    let mut next = 0;
    while next < clusters && commands.len() < 12 {
        let first = next + rng.below((clusters / 8).max(1));
        let last = (first + 1 + rng.below((clusters / 8).clamp(1, 5))).min(clusters);
        if first < last {
            let (at, end) = (first * layer.cluster, (last * layer.cluster).min(size));
            let file = pattern(dir, 61, rng);
            commands.push(format!("write -c -s {file} {at} {}", end - at));
        }
        next = last;
    }
    commands
}

/// A file with random bytes; qemu-io repeats it.
fn pattern(dir: &Path, len: usize, rng: &mut Rng) -> String {
    let mut bytes = vec![0; len];
    rng.fill(&mut bytes);
    let path = dir.join(format!("pattern-{:016x}", rng.next_u64()));
    std::fs::write(&path, bytes).expect("writing scratch");
    path.display().to_string()
}
