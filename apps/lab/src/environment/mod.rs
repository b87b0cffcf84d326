//! Describes the machine of a run, and detects disturbances during the run.

pub mod block;
pub mod load;
pub mod properties;

use std::fs;

use vdkit_block::CancelToken;

use crate::model::{Environment, PlaceInfo, Section};
use crate::peers;

/// Title of the section with the versions of other programs.
pub const PROGRAMS: &str = "Programs";

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
    let mut machine = Vec::new();
    let mut put = |name: &str, value: String| machine.push((name.to_owned(), value));
    put("processor", environment.cpu.clone());
    put("threads", environment.cores.to_string());
    put("memory", mib(environment.memory_bytes));
    put("memory available", mib(meminfo("MemAvailable").unwrap_or(0)));
    put("kernel", environment.kernel.clone());
    let guest = environment.virtualization.as_deref().unwrap_or("none detected");
    put("virtualization", guest.to_owned());
    let kvm = fs::File::options().read(true).write(true).open("/dev/kvm").is_ok();
    put("/dev/kvm", if kvm { KVM_OPENS } else { "not available" }.to_owned());
    let governor = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor";
    if let Ok(text) = fs::read_to_string(governor) {
        put("frequency governor", text.trim().to_owned());
    }
    if let Some(name) = os_release() {
        put("operating system", name);
    }
    let average = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let average: Vec<&str> = average.split_whitespace().take(3).collect();
    put("load average (1, 5, 15 min)", average.join(", "));
    vec![
        Section { title: "Machine".to_owned(), entries: machine },
        Section { title: PROGRAMS.to_owned(), entries: peers::versions(cancel) },
    ]
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
        assert_eq!(titles, ["Machine", "Programs"]);
    }

    #[test]
    fn guests_are_told_by_the_processors_flag() {
        assert_eq!(virtualization("flags\t: fpu vme\n"), None);
        assert!(virtualization("flags\t: fpu hypervisor\n").is_some());
    }
}
