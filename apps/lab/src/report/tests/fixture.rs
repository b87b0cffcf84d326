//! Generates a realistic run from a seed.

use vdkit_testkit::Rng;

use crate::model::{axes_of as axes, *};
use crate::stats::steady_window;

/// A number from 0 to 1.
fn even(rng: &mut Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

const BACKENDS: [(&str, f64); 3] = [("ext4", 1.0), ("xfs", 1.06), ("btrfs", 0.55)];
const LAYOUTS: [(&str, &str, f64); 4] = [
    ("raw-sparse", "-f raw", 1.0),
    ("qcow2", "-f qcow2", 0.9),
    ("qcow2-8k", "-f qcow2 -o cluster_size=8K", 1.35),
    ("qcow2-2m", "-f qcow2 -o cluster_size=2M", 0.6),
];
const CACHES: [(&str, f64); 3] = [("none", 1.0), ("writeback", 1.02), ("unsafe", 1.9)];
const PROFILES: [(&str, f64, f64); 3] = [
    ("rnd4k-q1-write", 9000.0, 1.0),
    ("rnd4k-q8-write", 42_000.0, 8.0),
    ("rnd4k-q32-write", 78_000.0, 32.0),
];
const TOOLS: [(&str, f64); 2] = [("vdkit", 1.0), ("qemu-nbd", 0.82)];

/// A sample with this rate of requests per second and this queue depth.
fn sample(rng: &mut Rng, round: u32, iops: f64, depth: f64) -> Sample {
    let mean = depth / iops * 1e9;
    let mut buckets: Vec<(u64, u64)> = Vec::new();
    for i in 0..60 {
        // Most requests are near the mean; a few take a hundred times as long.
        let ns = mean * 0.6 * 1.12f64.powi(i);
        let count = 40_000.0 * (-(f64::from(i) - 4.0).powi(2) / 18.0).exp()
            + 300.0 / (1.0 + f64::from(i).powi(2) / 6.0);
        buckets.push((ns as u64, count as u64));
    }
    let latencies = Histogram { buckets };
    let at = |fraction| latencies.quantile(fraction).unwrap_or(0) as f64;
    let values = [
        ("iops", iops),
        ("bytes_per_second", iops * 4096.0),
        ("latency_p50_ns", at(0.5)),
        ("latency_p99_ns", at(0.99)),
        ("latency_p9999_ns", at(0.9999)),
        ("final_fsync_seconds", 0.02 + 0.05 * even(rng)),
        ("flushes", 3.0),
    ];
    let seconds: Vec<f64> = (1..=60).map(|i| f64::from(i) * 0.5).collect();
    let noisy = |i: &f64, rng: &mut Rng| {
        let burst = if *i < 6.0 { 1.5 } else { 1.0 };
        iops * burst * (0.95 + 0.1 * even(rng))
    };
    let series: Vec<f64> = seconds.iter().map(|i| noisy(i, rng)).collect();
    Sample {
        round,
        values: values.map(|(key, value)| (key.to_owned(), value)).into(),
        steady: steady_window("iops", &seconds, &series),
        series: vec![Series { metric: "iops".to_owned(), seconds, values: series }],
        latencies: Some(latencies),
        raw: None,
        started: 1_795_306_500,
        seconds: 31.4,
    }
}

/// The run: 3 places × 4 layouts × 3 cache modes × 3 loads with vdkit, and the default layout also
/// with another tool. One cell failed and one was skipped.
pub(in crate::report) fn run() -> Run {
    let mut rng = Rng::new(4711);
    let mut cells = Vec::new();
    for (backend, by_backend) in BACKENDS {
        for (layout, options, by_layout) in LAYOUTS {
            for (cache, by_cache) in CACHES {
                for (profile, base, depth) in PROFILES {
                    for (tool, by_tool) in TOOLS {
                        if tool != "vdkit" && (layout != "qcow2" || cache != "none") {
                            continue;
                        }
                        let axes = axes(&[
                            ("backend", backend),
                            ("layout", layout),
                            ("cache", cache),
                            ("profile", profile),
                            ("tool", tool),
                        ]);
                        let iops = base * by_backend * by_layout * by_cache * by_tool;
                        let samples = (0..5)
                            .map(|round| {
                                let noise = 0.97 + 0.06 * even(&mut rng);
                                sample(&mut rng, round, iops * noise, depth)
                            })
                            .collect();
                        cells.push(cell(axes, options, samples));
                    }
                }
            }
        }
    }
    cells[5].samples[2].values.insert("iops".to_owned(), 900.0);
    cells[7].samples.clear();
    cells[7].outcome = Outcome::Failed("fio: exit code 1: No space left on device".to_owned());
    let plan = PlanSummary {
        name: "cache-modes".to_owned(),
        title: "Cache modes, layouts and file systems".to_owned(),
        question: "Which cache mode and layout serve a guest best here?".to_owned(),
        axes: ["backend", "layout", "cache", "profile", "tool"].map(str::to_owned).into(),
        metric: "iops".to_owned(),
        baseline: Some(axes(&[("layout", "qcow2"), ("cache", "none")])),
        ..PlanSummary::default()
    };
    Run {
        id: "20261122-001500-cache-modes-7f3a".to_owned(),
        plan,
        published: published(),
        quick: false,
        seed: 1,
        started: 1_795_306_500,
        ended: Some(1_795_311_222),
        vdkit_version: "0.1.0".to_owned(),
        environment: environment(),
        cells,
        warnings: vec![Warning {
            kind: "load".to_owned(),
            text: "Other programs used 0.8 processors on average while cells ran.".to_owned(),
            cells: Vec::new(),
        }],
    }
}

fn cell(axes: Axes, options: &str, samples: Vec<Sample>) -> Cell {
    let key: Vec<String> = axes.iter().map(|(axis, value)| format!("{axis}={value}")).collect();
    let place = format!("/mnt/{}", axes[0].1);
    Cell {
        key: key.join("/"),
        commands: vec![
            format!("vdkit create {options} {place}/lab.img 4G"),
            format!("vdkit serve {place}/lab.img --nbd unix:/run/lab.sock --cache {}", axes[2].1),
            "fio --name=load --ioengine=nbd --uri='nbd+unix:///?socket=/run/lab.sock' --rw=randwrite --bs=4k --iodepth=32 --runtime=30 --time_based --output-format=json+".to_owned(),
        ],
        axes,
        samples,
        outcome: Outcome::Measured,
        notes: Vec::new(),
    }
}

fn published() -> Vec<Published> {
    let source =
        "A storage comparison of 2012, four disks behind a controller (https://example.org/zvol)";
    [("raw-sparse", 50.5), ("qcow2", 45.8), ("qcow2-8k", 170.0), ("vmdk", 30.0)]
        .map(|(layout, megabytes)| Published {
            axes: axes(&[("layout", layout)]),
            metric: "bytes_per_second".to_owned(),
            value: megabytes * 1e6,
            source: source.to_owned(),
        })
        .into()
}

fn environment() -> Environment {
    let place = |name: &str| PlaceInfo {
        name: name.to_owned(),
        path: format!("/mnt/{name}"),
        file_system: Some(name.to_owned()),
        mount_options: Some("rw,relatime".to_owned()),
        device: Some("/dev/loop0".to_owned()),
        beneath: vec!["loop over /srv/a.img".to_owned(), "virtio disk vda".to_owned()],
        rotational: Some(false),
        scheduler: Some("none".to_owned()),
        write_cache: Some("write back".to_owned()),
        total_bytes: 64 << 30,
        free_bytes: 41 << 30,
        ..PlaceInfo::default()
    };
    let section = |title: &str, entries: &[(&str, &str)]| Section {
        title: title.to_owned(),
        entries: axes(entries),
    };
    Environment {
        cpu: "AMD EPYC 7443P 24-Core Processor".to_owned(),
        cores: 2,
        memory_bytes: 8 << 30,
        kernel: "Linux 6.1.0-40-amd64".to_owned(),
        virtualization: Some("KVM".to_owned()),
        places: BACKENDS.map(|(name, _)| place(name)).into(),
        sections: vec![
            section(
                "Machine",
                &[
                    ("processor", "AMD EPYC 7443P"),
                    ("memory", "8 GiB"),
                    ("governor", "performance"),
                ],
            ),
            section("Programs", &[("fio", "3.33"), ("qemu-img", "10.0.2"), ("nbdkit", "1.32.5")]),
        ],
    }
}
