//! Which machine this is.

use std::fs;

/// The host's name.
pub(super) fn name() -> String {
    let name = sysinfo::System::host_name().ok().filter(|name| !name.is_empty());
    name.unwrap_or_else(|| "unnamed".to_owned())
}

/// A number that processes share exactly if they share a machine, its boot and its network.
///
/// The network is in it because two containers of one machine with networks of their own cannot meet at the loopback
/// address, which is what the number is used for.
pub(super) fn id() -> u128 {
    let mut hasher = blake3::Hasher::new_derive_key("shoal 2026 host id");
    let read = |path: &str| fs::read(path).ok().filter(|content| !content.is_empty());
    let machine = read("/etc/machine-id").or_else(|| read("/var/lib/dbus/machine-id"));
    let boot = read("/proc/sys/kernel/random/boot_id");
    let network = fs::read_link("/proc/self/ns/net").ok();
    if machine.is_none() && boot.is_none() {
        // Systems without those files.
        hasher.update(name().as_bytes());
        hasher.update(&sysinfo::System::boot_time().unwrap_or(0).to_le_bytes());
    }
    for part in [machine, boot, network.map(|path| path.as_os_str().as_encoded_bytes().to_vec())] {
        let part = part.unwrap_or_default();
        hasher.update(&(part.len() as u64).to_le_bytes()).update(&part);
    }
    let mut short = [0; 16];
    short.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    u128::from_le_bytes(short)
}
