//! Describes the machine of a run, and detects disturbances during the run.

pub mod block;
pub mod load;
pub mod mounts;
pub mod properties;

use std::fs;

use vdkit_block::CancelToken;

use crate::model::{Environment, PlaceInfo, PlaceKind, Section};
use crate::peers;

/// Describes this machine and the places.
pub fn describe(places: &[PlaceInfo], cancel: &CancelToken) -> Environment {
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let mut lines = cpu.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().to_owned())
    };
    let uname = rustix::system::uname();
    let kernel =
        format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy());
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u32;
    let mut places = places.to_vec();
    for place in &mut places {
        place.properties = properties::of(place, cancel);
    }
    let mut environment = Environment {
        cpu: field("model name").unwrap_or_else(|| uname.machine().to_string_lossy().into_owned()),
        cores,
        memory_bytes: meminfo("MemTotal").unwrap_or(0),
        kernel,
        virtualization: virtualization(&cpu),
        places,
        sections: Vec::new(),
    };
    environment.sections = sections(&environment, cancel);
    environment
}

/// That /dev/kvm can be opened does not prove that a guest runs: nested KVM may hang. The result of
/// booting a guest is in the notes of cells with guests.
const KVM_OPENS: &str = "can be opened; only booting a guest shows whether KVM works";

fn sections(environment: &Environment, cancel: &CancelToken) -> Vec<Section> {
    let mut machine = vec![
        ("processor".to_owned(), environment.cpu.clone()),
        ("threads".to_owned(), environment.cores.to_string()),
        ("memory".to_owned(), mib(environment.memory_bytes)),
        ("memory available".to_owned(), mib(meminfo("MemAvailable").unwrap_or(0))),
        ("kernel".to_owned(), environment.kernel.clone()),
    ];
    let guest = environment.virtualization.clone().unwrap_or_else(|| "none detected".to_owned());
    machine.push(("virtualization".to_owned(), guest));
    let kvm = fs::File::options().read(true).write(true).open("/dev/kvm").is_ok();
    machine.push(("/dev/kvm".to_owned(), if kvm { KVM_OPENS } else { "not available" }.to_owned()));
    let governor = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor";
    if let Ok(text) = fs::read_to_string(governor) {
        machine.push(("frequency governor".to_owned(), text.trim().to_owned()));
    }
    if let Some(name) = os_release() {
        machine.push(("operating system".to_owned(), name));
    }
    let average = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let average: Vec<&str> = average.split_whitespace().take(3).collect();
    machine.push(("load average (1, 5, 15 min)".to_owned(), average.join(", ")));
    let mut all = vec![Section { title: "Machine".to_owned(), entries: machine }];
    for place in &environment.places {
        all.push(Section { title: format!("Place {}", place.name), entries: entries_of(place) });
    }
    all.push(Section { title: "Programs".to_owned(), entries: peers::versions(cancel) });
    all
}

fn entries_of(place: &PlaceInfo) -> Vec<(String, String)> {
    let kind = match place.kind {
        PlaceKind::Directory => "folder",
        PlaceKind::Device => "device",
    };
    let mut entries = vec![(kind.to_owned(), place.path.clone())];
    let mut put = |name: &str, value: Option<String>| {
        entries.extend(value.map(|value| (name.to_owned(), value)));
    };
    put("file system", place.file_system.clone());
    put("mount options", place.mount_options.clone());
    put("device", place.device.clone());
    put("stands on", (!place.beneath.is_empty()).then(|| place.beneath.join("; ")));
    put("rotational", place.rotational.map(|yes| if yes { "yes" } else { "no" }.to_owned()));
    put("scheduler", place.scheduler.clone());
    put("write cache", place.write_cache.clone());
    for (name, value) in &place.properties {
        put(name, Some(value.clone()));
    }
    put("size", Some(mib(place.total_bytes)));
    put("free", Some(mib(place.free_bytes)));
    entries
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

fn meminfo(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.split(':').next() == Some(name))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
}

fn os_release() -> Option<String> {
    let text = fs::read_to_string("/etc/os-release").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="))?;
    Some(line.trim_matches('"').to_owned())
}

/// The hypervisor below this machine, named by the firmware if possible.
fn virtualization(cpu: &str) -> Option<String> {
    let flags = cpu.lines().find(|line| line.starts_with("flags"))?;
    if !flags.split_whitespace().any(|flag| flag == "hypervisor") {
        return None;
    }
    let name = |file: &str| {
        let text = fs::read_to_string(format!("/sys/class/dmi/id/{file}")).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    let words: Vec<String> = ["sys_vendor", "product_name"].into_iter().filter_map(name).collect();
    Some(if words.is_empty() { "unknown hypervisor".to_owned() } else { words.join(" ") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_described() {
        let place = block::folder(&std::env::temp_dir()).unwrap();
        let found = describe(&[place], &CancelToken::default());
        assert!(!found.cpu.is_empty() && found.cores > 0 && found.memory_bytes > 1 << 20);
        assert!(found.kernel.starts_with("Linux "), "{}", found.kernel);
        let titles: Vec<&str> = found.sections.iter().map(|s| s.title.as_str()).collect();
        assert_eq!((titles[0], titles.len(), titles[2]), ("Machine", 3, "Programs"));
    }

    #[test]
    fn guests_are_told_by_the_processors_flag() {
        assert_eq!(virtualization("flags\t: fpu vme\n"), None);
        assert!(virtualization("flags\t: fpu hypervisor\n").is_some());
    }
}
