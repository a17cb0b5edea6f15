//! Memory of intermediate results, used again from layer to layer: what the system gives anew comes page by page, and slowly.

use std::sync::Arc;

use burn::tensor::TensorData;
use burn_flex::FlexTensor;

/// How many results are kept: as many as a layer has.
const KEPT: usize = 6;

/// Results of earlier calls. Those whose tensors are gone are free to be used again.
#[derive(Debug, Default)]
pub(super) struct Buffers(Vec<FlexTensor>);

impl Buffers {
    /// A tensor of this shape whose elements are any, and which nobody else has.
    pub(super) fn take(&mut self, rows: usize, columns: usize) -> FlexTensor {
        // One reference is held here, one is made by asking.
        let free =
            |tensor: &FlexTensor| tensor.layout().shape().as_slice() == [rows, columns] && Arc::strong_count(&tensor.data_arc()) == 2;
        match self.0.iter().position(free) {
            Some(place) => self.0.remove(place),
            None => FlexTensor::from_data(TensorData::new(vec![0f32; rows * columns], [rows, columns])),
        }
    }

    /// Gives a tensor out. Nobody may write to it: that would copy it first.
    pub(super) fn give(&mut self, tensor: FlexTensor) -> FlexTensor {
        if self.0.len() == KEPT {
            self.0.remove(0);
        }
        self.0.push(tensor.clone());
        tensor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_only_when_nobody_has_it() {
        let mut buffers = Buffers::default();
        let start = |tensor: &FlexTensor| tensor.storage::<f32>().as_ptr();
        let mut first = buffers.take(2, 3);
        first.storage_mut::<f32>().fill(1.0);
        let first = buffers.give(first);
        let second = buffers.take(2, 3);
        assert_ne!(start(&first), start(&second));
        let second = buffers.give(second);
        let at = start(&first);
        drop(first);
        // Of another shape, and then of the same.
        let other = buffers.take(3, 2);
        assert_ne!(start(&other), at);
        let again = buffers.take(2, 3);
        assert_eq!((start(&again), again.layout().shape().as_slice()), (at, [2, 3].as_slice()));
        drop(second);
    }

    #[test]
    fn only_so_many_are_kept() {
        let mut buffers = Buffers::default();
        for columns in 1..50 {
            let tensor = buffers.take(1, columns);
            assert_eq!(tensor.storage::<f32>().len(), columns);
            drop(buffers.give(tensor));
            assert!(buffers.0.len() <= KEPT);
        }
    }
}
